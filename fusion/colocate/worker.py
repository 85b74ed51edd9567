"""The worker: one card that trains and generates.

    prepare ─► TRAIN ──switch──► INFER ──switch──► TRAIN …
                │                  │
                reference, train   generate (control: status, submit, abort meanwhile)
                save, export

A switch to INFER releases the gradients, sends the optimizer to the host, reshards the weights bucket by bucket into
the inference layout and gives what is left of the card to the KV cache; a switch to TRAIN goes the same way back. The
optimizer returns only when training needs it, so reference log-probabilities are computed in the room it leaves.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from distqueue import PackedBatch
from distqueue.hierarchy import read_once
from fusion.colocate.phases import Phase, PhaseMachine
from fusion.colocate.samples import READ, REFERENCE, TRAIN, pack_outputs, split_responses, to_sequences
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.weights import PolicyWeights, ReferenceWeights
from fusion.inference import Engine, Output, Request
from fusion.model import ModelConfig, save_folder
from fusion.npu import open_device
from fusion.offload import HostPool, Offloader
from fusion.telemetry import MemoryLedger, Metrics, Span, Timeline
from fusion.training import Sequences, TrainEngine, load_checkpoint, save_checkpoint
from fusion.training.algorithms import make_loss

PUT_EVERY = 64
"""Finished samples a card gathers before it puts them to the queue: one message for many short ones."""


class Samples(Protocol):
    """The part of the queue's face a worker uses."""

    def put(self, batch: PackedBatch) -> Any: ...

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch: ...


@dataclass
class StageReport:
    """What one card tells the controller of a stage."""

    metrics: dict[str, Any]
    spans: list[Span]
    memory: MemoryLedger
    outputs: list[Output] = field(default_factory=list)
    """Only where the controller asked to keep them."""


class Worker:
    """Stages are methods; all cards run the same stage at once. Arguments and results are plain data."""

    def __init__(self, spec: WorkerSpec, rank: int, queue: Samples | None):
        self.spec, self.rank, self.queue = spec, rank, queue
        self.phases = PhaseMachine(rank)
        self.timeline = Timeline(f"card {rank}")
        self.stage = "start"

    def rendezvous(self) -> str:
        """An address at which the other cards can reach this one."""
        host = socket.gethostbyname(socket.gethostname()) if self.spec.across_nodes else "127.0.0.1"
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def prepare(self, address: str) -> str:
        """Opens the card, joins the other workers, loads the model in the training layout; says what card it is."""
        spec = self.spec
        self.phases.begin(Phase.TRAIN)
        # Ray shows a worker only its own card, under index 0; an emulated one is this process's own.
        self.device = open_device(spec.device.kind, capacity_bytes=spec.device.capacity_bytes)
        self.metrics = Metrics(self.device.synchronize)
        torch.set_num_threads(1)
        if spec.world > 1:
            backend = self.device.process_group_backend
            dist.init_process_group(backend, init_method=address, rank=self.rank, world_size=spec.world)
        self.weights = PolicyWeights(spec, ModelConfig.from_hf(spec.model.path), self.rank, self.device)
        train, infer = self.weights.train, self.weights.infer
        self.reference_weights = ReferenceWeights(train, self.device) if spec.needs_reference else None
        self.trainer = TrainEngine(
            train,
            self.weights.train_mesh,
            self.device,
            spec.training,
            temperature=spec.rollout.temperature or 1.0,
            total_steps=spec.steps,
        )
        self.engine = Engine(infer, self.weights.engine_mesh, self.device, spec.rollout, spec.seed)
        self.offloader = Offloader(self.device, HostPool(self.device))
        self.optimizer_names = list(self.trainer.optimizer.tensors())
        self.loss = make_loss(spec.algorithm)
        self.phases.arrive(Phase.TRAIN)
        return self.device.describe()

    def switch(self, phase: str, version: int) -> StageReport:
        """Moves the card to the phase ``train`` or ``infer``; ``version`` is that of the weights."""
        target = Phase(phase)
        self.phases.begin(target)
        with self._stage(f"switch to {phase}", "switch"):
            self._to_infer(version) if target is Phase.INFER else self._to_train()
        self.phases.arrive(target)
        return self._report()

    def _to_infer(self, version: int) -> None:
        with self.metrics.timer("switch/offload"):
            self.trainer.release_gradients()
            if self.spec.fusion.offload and self._optimizer_resident:
                self.offloader.out(self.trainer.optimizer.tensors())
        with self.metrics.timer("switch/reshard"):
            moved = self.weights.to_infer()
        self.metrics.add("switch/bytes_moved_total", moved.bytes_moved, rule="sum")
        with self.metrics.timer("switch/kv"):
            self.engine.policy_version = version
            self.engine.allocate_kv()

    def _to_train(self) -> None:
        self.engine.release_kv()
        with self.metrics.timer("switch/reshard"):
            moved = self.weights.to_train()
        self.metrics.add("switch/bytes_moved_total", moved.bytes_moved, rule="sum")

    def generate(self, requests: Sequence[Request], keep: bool = False) -> StageReport:
        """Runs this card's engine until all its requests have ended. Every card of an engine calls it; the requests
        are the first one's. Finished samples go to the queue as they come, or back to the caller with ``keep``."""
        self.phases.require("generate")
        kept: list[Output] = []
        with self._stage("generate", "gen"):
            before = self.engine.status()
            if requests:
                self.engine.submit(requests)
            pending = self.engine.step()
            while not self.engine.idle:
                if not keep and len(pending) >= PUT_EVERY:
                    pending = self._put(pending)
                pending += self.engine.step()
            if keep:
                kept = pending
            else:
                self._put(pending)
                self._count_generation(before)
            self._remember_memory("infer")
        return self._report(kept)

    def reference(self, minibatches: list[list[list[str]]]) -> StageReport:
        """Adds the column `ref_logprobs` to the samples of every minibatch ``[minibatch][dp rank]`` of sample ids."""
        self.phases.require("reference")
        assert self.reference_weights is not None, "no reference: algorithm.kl_coef is 0"
        with self._stage("reference", "ref"), self.reference_weights.in_place():
            ids = [id for shares in minibatches for id in shares[self._mesh.dp_rank]]
            batch = self._read(ids, READ)
            logprobs, _ = self.trainer.logprobs(to_sequences(batch))
            if self._mesh.tp_rank == 0 and ids:
                columns = {REFERENCE: split_responses(logprobs.cpu(), batch)}
                self._samples.put(PackedBatch.from_samples(batch.ids, columns))
        return self._report()

    def train(self, minibatches: list[list[list[str]]]) -> StageReport:
        """One optimizer step a minibatch ``[minibatch][dp rank]`` of sample ids."""
        self.phases.require("train")
        with self._stage("train", "train"):
            self._load_optimizer()
            columns = (*TRAIN, REFERENCE) if self.reference_weights is not None else TRAIN
            for shares in minibatches:
                batch = self._read(shares[self._mesh.dp_rank], columns)
                self._learn(to_sequences(batch))
            self._remember_memory("train")
        return self._report()

    def _learn(self, sequences: Sequences) -> None:
        self.metrics.update(self.trainer.forward_backward(sequences, self.loss))
        self.metrics.update(self.trainer.optimizer_step())

    def save(self, checkpoint: str, export: str) -> None:
        """Writes the trainer's state and, as a Hugging Face folder, the weights."""
        self.phases.require("save")
        self._load_optimizer()
        save_checkpoint(self.trainer, checkpoint)
        save_folder(self.weights.train, export, tokenizer_from=self.spec.model.path)

    def restore(self, checkpoint: str) -> None:
        self.phases.require("save")
        self._load_optimizer()
        load_checkpoint(self.trainer, checkpoint)

    def control(self, request: str, *args: Any) -> Any:
        """Answered while a stage runs: ``status``, ``submit`` (requests), ``abort`` (request ids)."""
        match request:
            case "status":
                return {"rank": self.rank, "phase": self.phases.phase.value, "stage": self.stage} | (
                    self.engine.status() if hasattr(self, "engine") else {}
                )
            case "submit":
                return self.engine.submit(*args)
            case "abort":
                return self.engine.abort(*args)
        raise ValueError(f"control request {request!r}: expected status, submit or abort")

    @property
    def _mesh(self):
        return self.weights.train_mesh

    @property
    def _samples(self) -> Samples:
        assert self.queue is not None, "this worker was started without a queue"
        return self.queue

    @property
    def _optimizer_resident(self) -> bool:
        return all(self.offloader.resident(name) for name in self.optimizer_names)

    def _load_optimizer(self) -> None:
        with self.metrics.timer("switch/onload"):
            if not self._optimizer_resident:
                self.offloader.back(self.optimizer_names)
            self.trainer.allocate_gradients()

    def _read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        return read_once(self._samples, ids, columns, self._mesh.tp_group)

    def _put(self, outputs: list[Output]) -> list[Output]:
        if outputs:
            self._samples.put(pack_outputs(outputs))
        return []

    def _count_generation(self, before: dict[str, float]) -> None:
        if self.engine.mesh.rank != 0:
            return  # the engine's figures are those of all its cards
        after = self.engine.status()
        for name in ("generated_tokens", "dummy_steps", "preemptions", "prefix_hit_tokens"):
            self.metrics.add(f"rollout/{name}", after[name] - before[name], rule="sum")

    def _remember_memory(self, phase: str) -> None:
        self._ledger.record(phase, self.device.memory_by_owner(), self.device.memory().peak_allocated)

    @contextmanager
    def _stage(self, name: str, kind: str) -> Iterator[None]:
        self.stage, self._ledger = name, MemoryLedger()
        self.device.reset_peak()
        with self.timeline.span(name, kind=kind):
            yield
            self.device.synchronize()
        self.stage = "idle"

    def _report(self, outputs: Sequence[Output] = ()) -> StageReport:
        return StageReport(self.metrics.take(), self.timeline.drain(), self._ledger, list(outputs))
