"""The worker: one card with the roles its deployment gives it. One class for all deployments.

    prepare ─► TRAIN ──switch──► INFER ──switch──► TRAIN …          cards that only generate or score: STANDBY ─► …
                │                  │
                reference, score   generate (control meanwhile: submit, abort, …)
                train, snapshot    (save, in a thread of its own, whatever the phase: what the snapshot has copied)

A stage is a method that all cards concerned run at once; between two stages a card only copies (the optimizer, to and
from the host). How a card changes its phase is `PhaseSwitcher`'s, what frozen models say `FrozenRoles`'.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distqueue import PackedBatch
from fusion.colocate.checkpoint_writer import CheckpointWriter
from fusion.colocate.meshes import Meshes
from fusion.colocate.parts import worker_parts
from fusion.colocate.phases import Phase, PhaseMachine
from fusion.colocate.samples.reader import StageReader
from fusion.colocate.samples.sequences import REFERENCE, split_responses, summed_log_ratios, to_sequences
from fusion.colocate.share import InferenceShare
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.stages import StageLog, StageReport, wait_kind
from fusion.colocate.together import together
from fusion.colocate.weights.policy import PolicyWeights
from fusion.colocate.weights.weight_receiver import WeightReceiver
from fusion.inference import EmbeddedEngine, Request
from fusion.model import Mesh, ModelConfig
from fusion.npu import Device, open_device
from fusion.offload import HostPool, StreamedStates
from fusion.rollout import SuspendedSample
from fusion.rollout.detokenize import Detokenizer
from fusion.rollout.engine_stage import EngineStage
from fusion.rollout.partial_samples import SampleStore
from fusion.training import EmbeddedTrainEngine, Sequences, load_checkpoint
from fusion.training.algorithms import make_algorithm
from fusion.training.states import ResidentStates


class Worker:
    """Stages are methods; all cards they concern run the same stage at once. Arguments and results are plain data."""

    def __init__(self, spec: WorkerSpec, rank: int, queue: SampleStore):
        self.spec, self.rank, self.queue = spec, rank, queue
        self.phases = PhaseMachine(rank, spec.deployment.roles_of(rank))
        self.trainer: EmbeddedTrainEngine | None = None
        self.engine: EmbeddedEngine | None = None

    def rendezvous(self) -> str:
        """An address at which the other cards can reach this one."""
        host = socket.gethostbyname(socket.gethostname()) if self.spec.across_nodes else "127.0.0.1"
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def prepare(self, address: str, device: Device | None = None) -> str:
        """Opens the card (unless it is handed in), joins the other workers (unless they have joined), loads what its
        roles need, and says what card it is."""
        spec = self.spec
        home = Phase.TRAIN if self.rank in spec.deployment.train else Phase.STANDBY
        self.phases.begin(home)
        # Ray shows a worker only its own card, under index 0; an emulated one is this process's own.
        self.device = device or open_device(
            spec.device.kind, capacity_bytes=spec.device.capacity_bytes, streams=spec.device.streams
        )
        self.parts, pacer = worker_parts(spec)
        self.log = StageLog(self.rank, self.device, pacer)
        torch.set_num_threads(1)
        if spec.world > 1 and not dist.is_initialized():
            backend = self.device.process_group_backend
            dist.init_process_group(backend, init_method=address, rank=self.rank, world_size=spec.world)
        with self.log.work("prepare"):
            self._load()
        self.phases.arrive(home)
        return self.device.describe()

    def _load(self) -> None:
        spec, device, pool = self.spec, self.device, HostPool(self.device)
        config = ModelConfig.from_hf(spec.model.path)
        self.meshes = meshes = Meshes.create(spec, self.rank)
        self.reading = StageReader(spec, meshes, self.queue, self.log.timeline)
        self.weights = PolicyWeights(spec, config, self.rank, device, meshes)
        self.roles = self.parts.roles(spec, self.rank, device, meshes, self.weights, pool)
        if self.weights.train is not None:
            assert meshes.train is not None
            streamed = partial(StreamedStates, pool=pool)
            self.trainer = self.parts.trainer(
                self.weights.train,
                meshes.train,
                device,
                spec.training,
                temperature=spec.temperature,
                total_steps=spec.steps,
                states=streamed if spec.fusion.offload == "stream" else ResidentStates,
            )
            self.checkpoint_writer = CheckpointWriter(
                self.trainer, device, pool, meshes.checkpoint_group, spec.model.path
            )
            self.algorithm = make_algorithm(spec.algorithm, spec.rollout.max_response_length)
            self.roles.settle(self._min_over_trainers(device.memory().free))
        if self.weights.infer is not None:
            assert meshes.engine is not None
            replay = spec.algorithm.replay == "rollout"
            given = self.weights.infer, meshes.engine, device, spec.rollout, spec.seed, replay, pool
            self.engine = self.parts.engine(*given)
            detokenize = Detokenizer(spec.detokenizer) if spec.detokenizer else None
            self.generating = EngineStage(self.engine, self.queue, detokenize)
        models = self.weights, meshes, self.trainer, self.engine
        told = self.log.metrics, self.log.timeline
        self.switcher = self.parts.switcher(spec, self.rank, device, self.phases, *models, pool, *told)
        if spec.ahead and self.engine is not None and self.trainer is None:
            policy = self.weights, meshes, self.engine
            self.receiver = WeightReceiver(
                spec, self.rank, device, *policy, self.parts.background_switcher, self._interim_report
            )
            self.switcher.staged = self.receiver.staged

    def switch(
        self, phase: str, version: int = 0, share: InferenceShare | None = None, while_generating: bool = False
    ) -> StageReport:
        """Switches the card to ``infer``, with the weights of policy ``version`` and the engines and memory of
        ``share`` (None: all), or to ``train``. ``while_generating``: cards that only generate keep decoding and call
        `receive`."""
        target = Phase(phase)
        name = f"switch to {phase}"
        with self._stage(name, "switch"):
            if target is Phase.INFER:
                share = share or InferenceShare.of(self.spec.rollout, len(self.spec.engines))
                self.switcher.to_infer(version, share, while_generating)
            else:
                self.switcher.to_train()
        if target is Phase.TRAIN and not self.roles.needs_room:
            with self.log.explain_out_of_memory(
                name
            ):  # behind the stage, which waits for the card: the copies go on beside what follows
                self.switcher.load_optimizer()
        return self.log.report()

    def receive(self, version: int, share: InferenceShare) -> StageReport:
        """Receives new weights on a card that only generates, while it generates. The other cards call `switch` to
        ``infer`` with ``while_generating``. Runs on a thread of its own."""
        return self.receiver.receive(version, share)

    def generate(self, requests: Sequence[Request], stay: bool = True) -> StageReport:
        """Runs this card's engine until it is told to ``pause`` or, unless it is to ``stay``, has nothing left to do.
        Every card of an engine calls it; the requests are the first one's. Finished samples go to the queue as they
        come; what is unfinished at the end is suspended."""
        self.phases.require("generate")
        with self._stage("generate", "gen"):
            suspended = self.generating.run(requests, stay=stay, metrics=self.log.metrics, timeline=self.log.timeline)
            self.log.record_memory("infer")
        return self.log.report(suspended=suspended)

    def answer(self, requests: Sequence[Request], rows: str = "") -> StageReport:
        """Runs this card's engine until all requests have finished; their answers are in the report. ``rows``: puts
        the answers' tokens to the queue as rows of these names (`EngineStage.answer`), to be scored; "": they are not
        kept. Called as `generate`, while nothing else is in the engine."""
        self.phases.require("generate")
        with self._stage("answer", "gen"):
            answers = self.generating.answer(requests, rows, self.log.timeline)
            self.log.record_memory("infer")
        return self.log.report(answers=answers)

    def reference(self, shares: list[list[str]]) -> StageReport:
        """Adds the column `ref_logprobs` to samples, ``shares`` of ids by DP rank of the mesh that hosts it. For
        algorithm.kl_in=reward the samples' `reference_kl` come back, from one card of each replica."""
        mesh = self.meshes.reference or self.meshes.train
        assert mesh is not None
        with self._stage("reference", "reference"), self._as(Phase.REFERENCE, mesh, self.roles.reference_in_hbm()):
            self.phases.require("reference")
            ids = shares[mesh.dp_rank]
            in_reward = self.spec.algorithm.kl_in == "reward"
            delivery = self.reading("reference", ids, mesh, ("behaviour_logprobs",) if in_reward else ())
            sequences = to_sequences(delivery)
            logprobs = self.roles.logprobs(sequences, self.trainer)
            if _first_of_replica(mesh) and ids:
                columns = {REFERENCE: split_responses(logprobs, delivery)}
                self.queue.put(PackedBatch.from_samples(ids, columns))
            self.log.record_memory("reference")
        speaks = in_reward and mesh.tp_rank == 0 and mesh.last_stage
        sums = summed_log_ratios(sequences, logprobs) if speaks else []
        return self.log.report(reference_kl=dict(zip(ids, sums, strict=False)))

    def score(self, shares: list[list[str]]) -> StageReport:
        """Scores samples by the reward model, ``shares`` of ids in the queue by DP rank of its mesh; the first card of
        a replica reports the outcomes."""
        mesh = self.meshes.reward_model
        assert mesh is not None
        with self._stage("score", "reward_model"), self._as(Phase.REWARD, mesh, self.roles.reward_model_in_hbm()):
            self.phases.require("score")
            ids = shares[mesh.dp_rank]
            batch = self.reading("score", ids, mesh).batch
            rows = range(len(batch))
            samples = [(batch["prompt"][row].tolist(), batch["response"][row].tolist()) for row in rows]
            outcomes = self.roles.scores(samples)
            self.log.record_memory("reward")
        return self.log.report(scores=dict(zip(ids, outcomes, strict=True)) if _first_of_replica(mesh) else {})

    def train(self, minibatches: list[list[list[str]]], version: int | None = None) -> StageReport:
        """One optimizer step a minibatch ``[minibatch][dp rank]`` of sample ids. What the trainer has summed before
        goes into the first. ``version``: of the policy as it is now; None: how stale the samples are is not told."""
        self.phases.require("train")
        trainer, mesh = self.trainer, self.meshes.train
        assert trainer is not None and mesh is not None
        with self._stage("train", "train"):
            self.switcher.load_optimizer()
            if not trainer.accumulating:
                together(self.meshes.trainers, self.rank, "gradients", trainer.allocate_gradients)
            mine = [shares[mesh.dp_rank] for shares in minibatches]
            weigh = partial(self._weigh, version)
            for number, batch in enumerate(self.reading.minibatches(trainer, mine, weigh)):
                with self.log.timeline.span("forward_backward", "train"):
                    self.log.metrics.update(trainer.forward_backward(batch, self.algorithm.loss))
                arrived = self.switcher.await_optimizer if number == 0 else None
                with self.log.timeline.span("optimizer_step", "optimizer"):
                    self.log.metrics.update(trainer.optimizer_step(arrived))
            self.log.record_memory("train")
        self.switcher.unload_optimizer()
        return self.log.report()

    def snapshot(self) -> StageReport:
        """Copies the trainer's state within the host, or to it, for `save` to write. Whatever `save` was at has
        ended."""
        self.phases.require("snapshot")
        with self.log.work("snapshot", "save"):
            self.checkpoint_writer.copy(self.switcher.training_state())
        return self.log.report()

    def save(self, checkpoint: str, export: str) -> None:
        """Writes what the last `snapshot` has copied: the trainer's state and, as a Hugging Face folder, the weights.
        Other stages may run meanwhile. Returns when all of it is on disk, that of the other cards, too."""
        self.checkpoint_writer.write(checkpoint, export)

    def restore(self, checkpoint: str) -> None:
        self.phases.require("restore")
        assert self.trainer is not None
        with self.log.work("restore"):
            self.switcher.load_optimizer()
            self.switcher.await_optimizer()
            load_checkpoint(self.trainer, checkpoint)

    # Control calls: answered while a stage runs, whatever it is. All but the first are for cards that generate; all but
    # the first and the last for the first card of an engine.

    def status(self) -> dict[str, Any]:
        """Reports rank, process id, phase, stage and, of a card that generates, the figures of `InferEngine.status`."""
        stage = self.log.stage_name if hasattr(self, "log") else "start"
        figures = self.engine.status() if self.engine is not None else {}
        return {"rank": self.rank, "pid": os.getpid(), "phase": self.phases.phase.value, "stage": stage} | figures

    def submit(self, requests: Sequence[Request]) -> None:
        """Hands further requests to the engine; they start at its next step."""
        self.generating.submit(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests at the engine's next step, with what they have generated; ids it does not have are ignored."""
        self.generating.engine.abort(request_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Frees the parked KV of suspended requests that have been resumed elsewhere."""
        self.generating.engine.forget(request_ids)

    def pause(self) -> None:
        """Ends `generate` after the engine's next step; what is unfinished is suspended."""
        self.generating.engine.pause()

    def take_ended_chunks(self) -> list[SuspendedSample]:
        """Returns the requests of this card that were suspended at their chunk's end since the last call."""
        return self.generating.take_suspended()

    def _stage(self, name: str, kind: str) -> AbstractContextManager[None]:
        trains = self.rank in self.spec.deployment.train
        return self.log.stage(name, kind, wait_kind(name, self.phases.phase, trains))

    def _min_over_trainers(self, nbytes: int) -> int:
        """The smallest of a number of all cards that train, so that they decide alike."""
        least = torch.tensor([nbytes])
        if self.meshes.trainers is not None:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self.meshes.trainers)
        return int(least)

    def _interim_report(self) -> StageReport:
        self.log.timeline.mark("switch/adopt")
        self.generating.count(self.log.metrics)
        return self.log.interim_report()

    def _weigh(self, version: int | None, sequences: Sequences) -> Sequences:
        return replace(self.algorithm.weigh(sequences), version=version)

    @contextmanager
    def _as(self, phase: Phase, mesh: Mesh, weights: AbstractContextManager[None]) -> Iterator[None]:
        """Inside, the card is in ``phase`` with these weights in HBM; then it is back where it was. All cards of the
        mesh get there and back, or none."""
        home, group = self.phases.phase, mesh.world_group
        together(group, self.rank, "phase", lambda: self.phases.check(phase))
        self.phases.begin(phase)
        try:
            with ExitStack() as inside:
                together(group, self.rank, f"to {phase.value}", lambda: inside.enter_context(weights))
                self.phases.arrive(phase)
                yield
                self.phases.begin(home)
                together(group, self.rank, f"back to {home.value}", inside.close)
            self.phases.arrive(home)
        except BaseException:
            self.phases.arrive(Phase.BROKEN)
            raise


def _first_of_replica(mesh: Mesh) -> bool:
    """Whether this rank speaks for all that compute the same samples."""
    return mesh.tp_rank == 0 and mesh.first_stage
