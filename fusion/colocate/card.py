"""Load a card: the trainer, engine and frozen models that its roles need, and the objects that connect them.

weights ─┬─ trainer ─┬─ switcher: TRAIN ◄─► INFER      reader: the queue's samples for a stage
         └─ engine ──┘      │                          generation: runs the engine for a stage
                            └─ receiver: new weights while the engine decodes
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fusion.colocate.checkpoint_writer import CheckpointWriter
from fusion.colocate.frozen.roles import FrozenRoles
from fusion.colocate.meshes import Meshes
from fusion.colocate.parts import WorkerParts
from fusion.colocate.phases import PhaseMachine
from fusion.colocate.samples.reader import StageReader
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.stages import StageLog, StageReport
from fusion.colocate.weights.policy import PolicyWeights
from fusion.colocate.weights.staged_weights import StagedWeights
from fusion.colocate.weights.switching import PhaseSwitcher
from fusion.colocate.weights.weight_receiver import WeightReceiver
from fusion.inference import InferEngine
from fusion.inference.pooled import KVPeers
from fusion.inference.stop_strings import StopStrings
from fusion.model import WeightHolder
from fusion.npu import Device
from fusion.offload import HostPool, StreamedStates
from fusion.rollout.detokenize import Detokenizer
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.exchange import TextExchange
from fusion.rollout.engine_stage import EngineStage
from fusion.rollout.kv_pool.files import KVFiles, open_files
from fusion.rollout.partial_samples import SampleStore
from fusion.training import TrainEngine
from fusion.training.algorithms import Algorithm, make_algorithm
from fusion.training.states import ResidentStates


@dataclass(frozen=True)
class LoadedCard:
    """``trainer`` and ``checkpoint_writer`` are None on a card that does not train, ``engine`` and ``generation`` on
    one that does not generate, ``drafter`` where nothing is drafted; ``receiver`` exists on cards that only generate
    and may do so while others train."""

    device: Device
    meshes: Meshes
    log: StageLog
    reader: StageReader
    weights: PolicyWeights
    roles: FrozenRoles
    algorithm: Algorithm
    switcher: PhaseSwitcher
    trainer: TrainEngine | None
    checkpoint_writer: CheckpointWriter | None
    engine: InferEngine | None
    generation: EngineStage | None
    drafter: TextDrafter | None
    receiver: WeightReceiver | None
    kv_files: KVFiles | None


def load_card(
    *,
    spec: WorkerSpec,
    rank: int,
    phases: PhaseMachine,
    queue: SampleStore,
    parts: WorkerParts,
    log: StageLog,
    exchange_texts: Callable[[bytes], bytes] | None = None,
    restart: int = 0,
    kv_peers: KVPeers | None = None,
) -> LoadedCard:
    """Create the process groups and load what the roles of ``rank`` need. Collective over all cards of the run; for a
    ``restart``, over those of its engine."""
    device, pool = log.device, HostPool(log.device)
    if restart:
        meshes = Meshes.create_restarted(spec, rank, restart, device.process_group_backend)
    else:
        meshes = Meshes.create(spec, rank, device.process_group_backend)
    place: dict[str, Any] = dict(spec=spec, rank=rank, device=device, meshes=meshes)
    weights = PolicyWeights(**place, train_model=parts.train_model, infer_model=parts.infer_model)
    # Before the trainer, while there is enough memory to copy a reference from the trained weights.
    roles = parts.roles(**place, policy=weights, pool=pool)
    trainer = _load_trainer(spec, weights, device=device, pool=pool, parts=parts)
    checkpoint_writer = None
    if trainer is not None:
        roles.choose_residency(_min_over(meshes.trainers, device.memory().free))
        checkpoint_writer = CheckpointWriter(
            trainer=trainer, device=device, pool=pool, group=meshes.checkpoint_group, tokenizer_from=spec.model.path
        )
    engine = generation = drafter = kv_files = None
    if weights.infer is not None:
        drafter = _load_drafter(spec, rank, exchange_texts)
        kv_files = open_files(spec.kv_pool, rank, kv_peers) if spec.kv_pool is not None else None
        generation = _load_generation(
            spec, weights.infer, queue, device=device, pool=pool, parts=parts, drafter=drafter, kv_files=kv_files
        )
        engine = generation.engine
    staged = receiver = None
    if spec.ahead and trainer is None and engine is not None and generation is not None:
        staged = StagedWeights(weights, device, HostPool(device), in_hbm=spec.fusion.double_buffer)
        receiver = WeightReceiver(
            **place,
            staged=staged,
            engine=engine,
            make_switcher=parts.background_switcher,
            interim_report=partial(_interim_report, log, generation),
        )
    return LoadedCard(
        device=device,
        meshes=meshes,
        log=log,
        reader=StageReader(spec, meshes, queue, timeline=log.timeline, metrics=log.metrics),
        weights=weights,
        roles=roles,
        algorithm=make_algorithm(spec.algorithm, spec.rollout.max_response_length),
        switcher=parts.switcher(
            **place,
            phases=phases,
            weights=weights,
            trainer=trainer,
            engine=engine,
            staged=staged,
            pool=pool,
            metrics=log.metrics,
            timeline=log.timeline,
        ),
        trainer=trainer,
        checkpoint_writer=checkpoint_writer,
        engine=engine,
        generation=generation,
        drafter=drafter,
        receiver=receiver,
        kv_files=kv_files,
    )


def _load_trainer(
    spec: WorkerSpec, weights: PolicyWeights, *, device: Device, pool: HostPool, parts: WorkerParts
) -> TrainEngine | None:
    if weights.train is None:
        return None
    return parts.trainer(
        model=weights.train,
        mesh=weights.train.mesh,
        device=device,
        config=spec.training,
        temperature=spec.temperature,
        total_steps=spec.steps,
        states=partial(StreamedStates, pool=pool) if spec.fusion.offload == "stream" else ResidentStates,
    )


def _load_drafter(spec: WorkerSpec, rank: int, exchange_texts: Callable[[bytes], bytes] | None) -> TextDrafter | None:
    drafter = TextDrafter.of(spec.rollout.drafts, single_paths=spec.rollout.backend == "vllm")
    if drafter is not None and exchange_texts is not None and rank in spec.drafting_ranks:
        drafter.exchange = TextExchange(exchange_texts, writer=rank, num_writers=len(spec.drafting_ranks))
    return drafter


def _load_generation(
    spec: WorkerSpec,
    model: WeightHolder,
    queue: SampleStore,
    *,
    device: Device,
    pool: HostPool,
    parts: WorkerParts,
    drafter: TextDrafter | None,
    kv_files: KVFiles | None,
) -> EngineStage:
    routing = spec.algorithm.replay == "rollout"
    engine = parts.engine(
        model=model,
        mesh=model.mesh,
        device=device,
        config=spec.rollout,
        seed=spec.seed,
        routing=routing,
        memory=pool,
        stop_strings=_stop_strings(spec),
        drafter=drafter,
        kv_store=kv_files,
    )
    return EngineStage(
        engine,
        queue,
        Detokenizer(spec.detokenizer) if spec.detokenizer else None,
        routing=routing,
        kept=spec.rollout.truncates,
        turns=spec.turns,
        drafter=drafter,
    )


def _stop_strings(spec: WorkerSpec) -> StopStrings | None:
    if not spec.rollout.sampling.stop:
        return None
    assert spec.detokenizer is not None, "rollout.sampling.stop: stop strings need a tokenizer"
    return StopStrings(spec.rollout.sampling.stop, Detokenizer(spec.detokenizer).decode)


def _interim_report(log: StageLog, generation: EngineStage) -> StageReport:
    """Report the running `generate` stage so far. Called on its thread, after it has adopted new weights."""
    log.timeline.mark("switch/adopt")
    generation.count(log.metrics)
    return log.interim_report()


def _min_over(group: dist.ProcessGroup | None, value: int) -> int:
    """Return the smallest value over a group's ranks, so that all of them make the same decision."""
    smallest = torch.tensor([value])
    if group is not None:
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    return int(smallest)
