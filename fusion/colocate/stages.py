"""What a card tells of the stages it runs: figures, spans, who held its memory, and who held it when it ran out.

On the timeline a stage is a span, and what is told of its inside lies within it. Between two stages the card waits for
the controller; the stage that ends the wait says for what (`wait_kind`). What is nobody's stays idle, so that all kinds
of a card add up to its wall clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion.colocate.phases import Phase
from fusion.npu import Device
from fusion.npu.failures import AbortedOnAllRanks, FailureKind, OutOfMemory, failures_in
from fusion.npu.pacer import Pacer
from fusion.rewards import RewardOutcome
from fusion.rollout.types import EvalAnswer, SuspendedSample
from fusion.telemetry import WAIT_DATA, WAIT_WEIGHTS, MemoryLedger, Metrics, Span, Timeline


@dataclass
class StageReport:
    """What one card tells the controller of a stage."""

    metrics: dict[str, Any]
    spans: list[Span]
    memory: MemoryLedger
    answers: list[EvalAnswer] = field(default_factory=list)
    """Of `Worker.answer`."""
    scores: dict[str, RewardOutcome] = field(default_factory=dict)
    """Of the reward model, by sample id."""
    suspended: list[SuspendedSample] = field(default_factory=list)
    """Samples that the engine has not finished."""
    reference_kl: dict[str, float] = field(default_factory=dict)
    """Log-ratio of behaviour to reference summed over the response, by sample id, where rewards are made of it."""
    until_ns: int = 0
    """Of a stage that goes on: up to when this tells of it (`wall_ns`)"""


def wait_kind(stage: str, phase: Phase, trains: bool) -> str:
    """The kind of the time that a card has waited for a stage, "" (idle) where it lacked nothing but the order.

    Args:
        phase: in which it waited.
        trains: whether it is a card that trains.
    """
    if stage in ("train", "reference", "score"):
        return WAIT_DATA
    if stage == "switch to train":  # who did not generate waited for those that did
        return WAIT_DATA if phase is not Phase.INFER else ""
    if stage in ("switch to infer", "generate", "answer"):
        return WAIT_WEIGHTS if not trains else ""
    return ""


class StageLog:
    """The records of one card. ``stage_name``: what it is doing; ``metrics`` are handed over with every report.
    ``pacer``: of a card that takes modelled time."""

    def __init__(self, rank: int, device: Device, pacer: Pacer | None = None):
        self.rank, self.device, self.pacer = rank, device, pacer
        self.stage_name = "start"
        self.metrics = Metrics()
        self.timeline, self._ledger = Timeline(f"card {rank}"), MemoryLedger()
        self._left_ns: int | None = None
        """When the last stage ended"""

    @contextmanager
    def stage(self, name: str, kind: str, waited: str = "") -> Iterator[None]:
        """The block is a stage; it ends when the card has done its work. ``waited``: the kind of the time since the
        stage before."""
        if waited and self._left_ns is not None:
            self.timeline.add(waited, self._left_ns, self.timeline.clock_ns())
        self.stage_name, self._kind, self._ledger = name, kind, MemoryLedger()
        self.device.reset_peak()
        paced = self.pacer.stage() if self.pacer else nullcontext()
        with self.work(name, kind), paced:
            yield
            self.device.synchronize()
        if self.pacer:
            self.pacer.tell(self.metrics, kind)
        self.stage_name = "idle"

    @contextmanager
    def work(self, name: str, kind: str = "") -> Iterator[None]:
        """The block is on the timeline (``kind``: default the name), and says so if it runs out of memory."""
        with self.timeline.span(name, kind), self.explain_out_of_memory(name):
            yield
        self._left_ns = self.timeline.clock_ns()

    def record_memory(self, phase: str) -> None:
        """Records who holds the memory now, and the stage's peak, as those of a phase."""
        self._ledger.record(phase, self.device.memory_by_owner(), self.device.memory().peak_allocated)

    def report(
        self,
        answers: Sequence[EvalAnswer] = (),
        scores: Mapping[str, RewardOutcome] | None = None,
        suspended: Sequence[SuspendedSample] = (),
        reference_kl: Mapping[str, float] | None = None,
    ) -> StageReport:
        """The last stage's."""
        told = list(answers), dict(scores or {}), list(suspended), dict(reference_kl or {})
        return StageReport(self.metrics.take(), self.timeline.drain(), self._ledger, *told)

    def interim_report(self) -> StageReport:
        """Of the stage that runs, what was not reported yet. Called by who runs it."""
        if self.pacer:
            self.pacer.tell(self.metrics, self._kind)
        self.timeline.cut()
        until_ns = self.timeline.clock_ns()
        return StageReport(self.metrics.take(), self.timeline.drain(), MemoryLedger(), until_ns=until_ns)

    @contextmanager
    def explain_out_of_memory(self, stage: str) -> Iterator[None]:
        """Reports who held the memory where the block runs out of it.

        Raises:
            OutOfMemory: in place of the allocator's error, or of an abort on all cards for want of memory on this one.
        """
        try:
            yield
        except (torch.OutOfMemoryError, AbortedOnAllRanks) as error:
            held = self.device.memory_by_owner()
            for failure in failures_in(error, rank=self.rank, stage=stage, bytes_by_owner=held):
                if failure.rank == self.rank and failure.kind is FailureKind.OUT_OF_MEMORY:
                    raise OutOfMemory(stage, failure) from error
            raise
