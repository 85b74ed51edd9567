"""Report the stages that a card runs: metrics, spans, memory by owner, also after an out-of-memory error.

On the timeline a stage is a span that contains the spans of its parts. Between two stages the card waits for the
controller; the kind of that wait is determined when the next stage begins (`wait_kind`). Time outside of all spans is
idle, so that all kinds of a card add up to its wall clock."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusion.colocate.phases import Phase
from fusion.npu import Device
from fusion.npu.failures import AbortedOnAllRanks, FailureKind, OutOfMemory, failures_in
from fusion.npu.pacer import Pacer
from fusion.npu.profile import Profile
from fusion.rewards import RewardOutcome
from fusion.rollout.types import EvalAnswer, SuspendedSample
from fusion.telemetry import WAIT_DATA, WAIT_WEIGHTS, MemoryLedger, Metrics, Span, Timeline

log = logging.getLogger(__name__)


@dataclass
class StageReport:
    """One card's report of a stage to the controller."""

    metrics: dict[str, Any]
    spans: list[Span]
    memory: MemoryLedger
    answers: list[EvalAnswer] = field(default_factory=list)
    """Result of `Worker.answer`."""
    scores: dict[str, RewardOutcome] = field(default_factory=dict)
    """Outcomes of the reward model, by sample id."""
    suspended: list[SuspendedSample] = field(default_factory=list)
    """Samples that the engine has not finished."""
    reference_kl: dict[str, float] = field(default_factory=dict)
    """Log-ratio of behaviour to reference summed over the response, by sample id; with algorithm.kl_in=reward, or where
    the reference has cards of its own."""
    has_lost: bool = False
    """Whether the stage went on without samples that the queue had lost"""
    until_ns: int = 0
    """End of an interim report of a stage that is still running (`wall_ns`)"""


def wait_kind(stage: str, phase: Phase, trains: bool) -> str:
    """Return the kind of the time that a card waited before ``stage``: for data, for weights, or "" (idle). ``phase``:
    in which it waited; ``trains``: whether it is a card that trains."""
    if stage in ("train", "accumulate", "reference", "score"):
        return WAIT_DATA
    if stage == "switch to train":  # cards that did not generate waited for those that did
        return WAIT_DATA if phase is not Phase.INFER else ""
    if stage in ("switch to infer", "generate", "answer"):
        return WAIT_WEIGHTS if not trains else ""
    return ""


class StageLog:
    """Record a card between two reports. ``stage_name``: the current one, or "idle"; ``pacer``: of modelled time."""

    def __init__(self, rank: int, device: Device, pacer: Pacer | None = None):
        self.rank, self.device, self.pacer = rank, device, pacer
        self.stage_name = "start"
        self.metrics = Metrics()
        self.timeline, self._ledger = Timeline(f"card {rank}"), MemoryLedger()
        self._kind = ""
        """Kind of the current stage"""
        self._left_ns: int | None = None
        """End of the last stage"""
        self._profile: Profile | None = None
        self._asked: deque[Path | None] = deque()
        """Arguments of `ask_profile` that were not carried out yet"""

    @contextmanager
    def stage(self, name: str, kind: str, waited: str = "") -> Iterator[None]:
        """Record the block as a stage, up to the device's end. ``waited``: the kind of time since the last."""
        if waited and self._left_ns is not None:
            self.timeline.add(waited, self._left_ns, self.timeline.clock_ns())
        self.stage_name, self._kind, self._ledger = name, kind, MemoryLedger()
        self.device.reset_peak()
        paced = self.pacer.stage() if self.pacer else nullcontext()
        with self.work(name, kind), paced:
            yield
            self.device.synchronize()
        if self.pacer:
            self.pacer.report(self.metrics, kind)
        self.stage_name = "idle"

    @contextmanager
    def work(self, name: str, kind: str = "") -> Iterator[None]:
        """Record the block on the timeline (``kind``: default the name); if it fails, the profile ends."""
        try:
            self._do_asked()
            with self.timeline.span(name, kind), self.explain_out_of_memory(name):
                yield
            self._do_asked()
        except BaseException:
            try:
                self.end_profile()
            except Exception:
                log.exception("the profile of a failed stage could not be written")
            raise
        self._left_ns = self.timeline.clock_ns()

    def begin_profile(self, path: Path) -> None:
        """Profile the stages until `end_profile`, with all spans' names. On their thread. ``path``: as of `Profile`."""
        self._profile = Profile(self.device.kind, path)
        self.timeline.annotate = torch.profiler.record_function

    def ask_profile(self, path: Path | None) -> None:
        """Ask for a profile, or for the end of that which runs (None). It is done on the stages' thread, between two
        steps of the engine, or at the beginning or the end of a stage. Any thread. ``path``: as of `Profile`."""
        self._asked.append(path)
        self.timeline.after_mark = self._do_asked

    def _do_asked(self) -> None:
        self.timeline.after_mark = None
        while self._asked:
            path = self._asked.popleft()
            self.end_profile()
            if path is not None:
                self.begin_profile(path)

    def end_profile(self) -> None:
        """Write the profile, unless none has begun or it was ended meanwhile. Called on the stages' thread."""
        profile, self._profile, self.timeline.annotate = self._profile, None, None
        if profile is not None:
            profile.close()

    def record_memory(self, phase: str) -> None:
        """Record the memory by owner now, and the stage's peak, as those of ``phase``. Activations have been freed by
        now: what the other owners leave of the peak counts as theirs."""
        memory, held = self.device.memory(), self.device.memory_by_owner()
        held["activations"] += max(0, memory.peak_allocated - sum(held.values()))
        self._ledger.record(phase, held, memory.peak_allocated, capacity=memory.capacity)

    def report(self, **results: Any) -> StageReport:
        """Return the report of the last stage, with its ``results`` by field; empty metrics and spans."""
        return StageReport(self.metrics.take(), self.timeline.drain(), self._ledger, **results)

    def interim_report(self) -> StageReport:
        """Return the report of the running stage since the last report. Called on the thread that runs it."""
        if self.pacer:
            self.pacer.report(self.metrics, self._kind)
        self.timeline.cut()
        until_ns = self.timeline.clock_ns()
        return StageReport(self.metrics.take(), self.timeline.drain(), MemoryLedger(), until_ns=until_ns)

    @contextmanager
    def explain_out_of_memory(self, stage: str) -> Iterator[None]:
        """Report the memory by owner if the block runs out of memory. Raise OutOfMemory instead of the allocator's
        error, or of an abort on all cards that was caused by a lack of memory on this card."""
        try:
            yield
        except (torch.OutOfMemoryError, AbortedOnAllRanks) as error:
            held = self.device.memory_by_owner()
            for failure in failures_in(error, rank=self.rank, stage=stage, bytes_by_owner=held):
                if failure.rank == self.rank and failure.kind is FailureKind.OUT_OF_MEMORY:
                    raise OutOfMemory(stage, failure) from error
            raise
