"""Compute the reference's log-probabilities on cards of its own, of each group from when it is complete.

    complete group ─ observe ─► begin: the cards run one call after the other ─► column `ref_logprobs` of the queue
                                └─► take: waits for the groups that are trained now

Without cards of its own, the cards that train compute it for a step or a part of one (`update`), which asks here what a
resumed run has already: it may have had such cards.

Invariants: every complete group is part of exactly one call, also over a checkpoint. At staleness 0 each call is of one
group, so that the batches that the reference computes do not depend on timing; above, of all that are complete."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusion.colocate import StageReport, Worker, WorkerSpec
from stalesync.cards.cards import Cards
from stalesync.cards.stage_calls import RunningStage, calls_of_replicas, stage_call
from stalesync.loop.sample_columns import SampleColumns
from stalesync.scoring.samples import Sample


@dataclass(kw_only=True)
class ReferenceStream:
    """Calls the cards of a run's reference. ``record_reports``: called with the cards' reports of every call."""

    spec: WorkerSpec
    cards: Cards
    record_reports: Callable[[Sequence[StageReport]], None]
    _complete: list[Sequence[Sample]] = field(default_factory=list)
    """Samples of groups that are part of no call yet"""
    _running: deque[tuple[RunningStage[StageReport], set[str]]] = field(default_factory=deque)
    """Calls in progress, in the order in which the cards run them, each with its groups"""
    _kl: dict[str, dict[str, float]] = field(default_factory=dict)
    """Group whose call has ended → log-ratio of behaviour to reference by row, of those that the queue had"""

    def observe(self, members: Sequence[Sample]) -> None:
        """Record that a group is complete: all of its samples are scored, and it may be trained."""
        if self.spec.reference is not None:
            self._complete.append(members)

    def begin(self) -> None:
        """Begin the calls of all complete groups, and take the results of those that have ended."""
        complete, self._complete = self._complete, []
        for groups in [complete] if self.spec.ahead and complete else [[group] for group in complete]:
            samples = SampleColumns.of([sample for members in groups for sample in members]).without_errors
            layout, ranks = self.spec.reference, self.spec.deployment.reference
            assert layout is not None
            shares = samples.split(layout.replicas, self.spec.training.share_prefixes)
            calls = [stage_call(Worker.reference, ids) for ids in shares]
            running = self.cards.begin_each(calls_of_replicas(layout, ranks, calls))
            self._running.append((running, {*samples.groups}))
        while self._running and not self._running[0][0].pending:
            self._end_first()

    def missing(self, samples: SampleColumns) -> SampleColumns:
        """Return the samples of groups that no call has computed."""
        return samples.where([group not in self._kl for group in samples.groups]) if self._kl else samples

    def take(self, groups: Iterable[str]) -> dict[str, float]:
        """Wait for these complete groups; return the log-ratio of behaviour to reference by row."""
        wanted = {*groups}
        self.begin()
        while any(call[1] & wanted for call in self._running):
            self._end_first()
        return {row: kl for group in wanted for row, kl in self._kl.pop(group, {}).items()}

    def settle(self) -> None:
        self.begin()
        while self._running:
            self._end_first()

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON; all complete groups have been waited for."""
        return {"reference_kl": self._kl}

    def load_state_dict(self, state: Mapping[str, Any], complete: Iterable[Sequence[Sample]]) -> None:
        """Restore the state; other keys are ignored. ``complete``: the samples of each complete group."""
        by_group, kl = {members[0].group: members for members in complete}, state.get("reference_kl", {})
        self._kl = {group: kl[group] for group in by_group if group in kl}
        for group, members in by_group.items():
            if group not in kl:
                self.observe(members)

    def _end_first(self) -> None:
        call = running, groups = self._running[0]
        reports = self.cards.wait(running)
        if self._running and self._running[0] is call:  # it has not been ended while this waited
            self._running.popleft()
            self.record_reports(reports)
            self._kl |= {group: {} for group in groups}
            for row, kl in ((row, kl) for report in reports for row, kl in report.reference_kl.items()):
                self._kl[row.rpartition("/")[0]][row] = kl
