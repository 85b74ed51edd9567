"""Load a card: the trainer, engine and frozen models that its roles need, and the objects that connect them.

weights ─┬─ trainer ─┬─ switcher: TRAIN ◄─► INFER      reader: the queue's samples for a stage
         └─ engine ──┘      │                          generation: runs the engine for a stage
                            └─ receiver: new weights while the engine decodes
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distqueue import SampleQueue
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
from fusion.colocate.weights.weight_receiver import WeightReceiver
from fusion.inference import InferEngine
from fusion.inference.pooled import KVPeers
from fusion.inference.stop_strings import StopStrings
from fusion.model import WeightHolder
from fusion.offload import HostPool, StreamedStates
from fusion.rollout.detokenize import Detokenizer
from fusion.rollout.drafts.budget import step_rows
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.exchange import TextExchange
from fusion.rollout.engine_stage import EngineStage
from fusion.rollout.kv_pool.files import KVFiles, open_files
from fusion.training import TrainEngine
from fusion.training.algorithms import make_algorithm
from fusion.training.states import ResidentStates


class LoadedCard:
    """Load what the roles of ``rank`` need. Construction is collective over all cards of the run; for a ``restart``,
    over those of its engine. Arguments are those of `LoadedWorker` and of its `prepare`.

    ``trainer`` and ``checkpoint_writer`` are None on a card that does not train, ``engine`` and ``generation`` on one
    that does not generate, ``drafter`` where nothing is drafted; ``receiver`` exists on cards that only generate and
    may do so while others train."""

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        rank: int,
        phases: PhaseMachine,
        queue: SampleQueue,
        parts: WorkerParts,
        log: StageLog,
        exchange_texts: Callable[[bytes], bytes] | None = None,
        restart: int = 0,
        kv_peers: KVPeers | None = None,
    ):
        self.log, self.device = log, log.device
        backend, pool = self.device.process_group_backend, HostPool(self.device)
        if restart:
            self.meshes = Meshes.create_restarted(spec, rank, restart, backend)
        else:
            self.meshes = Meshes.create(spec, rank, backend)
        place: dict[str, Any] = dict(spec=spec, rank=rank, device=self.device, meshes=self.meshes)
        self.weights = PolicyWeights(**place, train_model=parts.train_model, infer_model=parts.infer_model)
        # Before the trainer, while there is enough memory to copy a reference from the trained weights.
        self.roles: FrozenRoles = parts.roles(**place, policy=self.weights, pool=pool)
        self.trainer: TrainEngine | None = None
        self.checkpoint_writer: CheckpointWriter | None = None
        if self.weights.train is not None:
            self._load_trainer(self.weights.train, spec, parts, pool=pool)
        self.engine: InferEngine | None = None
        self.generation: EngineStage | None = None
        self.drafter: TextDrafter | None = None
        self.kv_files: KVFiles | None = None
        if self.weights.infer is not None:
            rows = step_rows(self.device.kind, paced=spec.pace is not None)
            self.drafter = TextDrafter.of(spec.rollout.drafts, rows, single_paths=spec.rollout.backend == "vllm")
            if self.drafter is not None and exchange_texts is not None and rank in spec.drafting_ranks:
                writers = len(spec.drafting_ranks)
                self.drafter.exchange = TextExchange(exchange_texts, writer=rank, num_writers=writers)
            self.kv_files = open_files(spec.kv_pool, rank, kv_peers) if spec.kv_pool is not None else None
            self._load_engine(self.weights.infer, spec, parts, pool=pool, queue=queue)
        staged = self.receiver = None
        if spec.ahead and self.trainer is None and self.engine is not None and self.generation is not None:
            staged = StagedWeights(self.weights, self.device, HostPool(self.device), in_hbm=spec.fusion.double_buffer)
            self.receiver = WeightReceiver(
                **place,
                staged=staged,
                engine=self.engine,
                make_switcher=parts.background_switcher,
                interim_report=partial(_interim_report, log, self.generation),
            )
        self.reader = StageReader(spec, self.meshes, queue, timeline=log.timeline, metrics=log.metrics)
        self.algorithm = make_algorithm(spec.algorithm, spec.rollout.max_response_length)
        self.switcher = parts.switcher(
            **place,
            phases=phases,
            weights=self.weights,
            trainer=self.trainer,
            engine=self.engine,
            staged=staged,
            pool=pool,
            metrics=log.metrics,
            timeline=log.timeline,
        )

    def _load_trainer(self, model: WeightHolder, spec: WorkerSpec, parts: WorkerParts, *, pool: HostPool) -> None:
        self.trainer = parts.trainer(
            model=model,
            mesh=model.mesh,
            device=self.device,
            config=spec.training,
            temperature=spec.temperature,
            total_steps=spec.steps,
            states=partial(StreamedStates, pool=pool) if spec.fusion.offload == "stream" else ResidentStates,
        )
        self.roles.choose_residency(_min_over(self.meshes.trainers, self.device.memory().free))
        self.checkpoint_writer = CheckpointWriter(
            trainer=self.trainer,
            device=self.device,
            pool=pool,
            group=self.meshes.checkpoint_group,
            tokenizer_from=spec.model.path,
        )

    def _load_engine(
        self, model: WeightHolder, spec: WorkerSpec, parts: WorkerParts, *, pool: HostPool, queue: SampleQueue
    ) -> None:
        stop_strings, routing = None, spec.algorithm.replay == "rollout"
        if spec.rollout.sampling.stop:
            assert spec.detokenizer is not None, "rollout.sampling.stop: stop strings need a tokenizer"
            stop_strings = StopStrings(spec.rollout.sampling.stop, Detokenizer(spec.detokenizer).decode)
        self.engine = parts.engine(
            model=model,
            mesh=model.mesh,
            device=self.device,
            config=spec.rollout,
            seed=spec.seed,
            routing=routing,
            memory=pool,
            stop_strings=stop_strings,
            drafter=self.drafter,
            kv_store=self.kv_files,
        )
        self.generation = EngineStage(
            self.engine,
            queue,
            Detokenizer(spec.detokenizer) if spec.detokenizer else None,
            routing=routing,
            kept=spec.rollout.truncates,
            turns=spec.turns,
            drafter=self.drafter,
        )


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
