"""What becomes of the groups under way: generated, scored, then to be trained, filtered, or failed.

generated samples ─┐                       ┌─► ledger: finished ─► take: trained
                   ├─ note ─ all of a group┤
scored samples ────┘                       └─► ledger: filtered by a rule, or failed; the queue lets its samples go
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distqueue import DistQueue
from fusion.telemetry import RunFolder
from fusion.training.algorithms import Algorithm
from stalesync.generation import Generation
from stalesync.samples import GeneratedSample, ScoredSample
from stalesync.scoring import Scorer
from stalesync.staleness import StalenessLedger


@dataclass
class Groups:
    """Every part is handed in. ``size``: samples of a group."""

    size: int
    ledger: StalenessLedger
    generation: Generation
    scorer: Scorer
    algorithm: Algorithm
    queue: DistQueue
    folder: RunFolder
    scored: dict[str, list[ScoredSample]] = field(default_factory=dict)
    """Of groups that are admitted and not trained: what is scored of them"""
    failed_rewards: int = 0
    row: int = 1
    """The step in whose record a group ends: the present one's, or in a cut the one's before, which it holds"""
    filtered: int = 0
    """Groups that were filtered since `take`"""
    _ended: list[ScoredSample] = field(default_factory=list)
    """Samples of groups that failed or were filtered since `take`"""

    def note(self, arrived: Sequence[GeneratedSample], scored: Sequence[ScoredSample]) -> None:
        """Takes notice of samples that are generated, and of others that are scored."""
        for sample in arrived:
            self.generation.buffer.finish(sample.id, sample.response_tokens)
            group = sample.prompt.id
            if self.generation.buffer.is_finished(group):
                left = self.generation.leave(group)
                if not self.scorer.concurrent:
                    self.ledger.finish(group, sum(one.prompt_tokens + one.generated for one in left))
        for one in scored:
            group = one.prompt.id
            members = self.scored.setdefault(group, [])
            members.append(one)
            if len(members) == self.size:
                self._judge(group, members)

    def take(self, trained: Iterable[str]) -> tuple[dict[str, list[ScoredSample]], list[ScoredSample]]:
        """The samples of these groups, which are to be trained; and of all groups that ended since the last call, by
        id."""
        groups = {group: self.scored.pop(group) for group in trained}
        everyone = [sample for members in groups.values() for sample in members] + self._ended
        self._ended, self.filtered = [], 0
        return groups, sorted(everyone, key=lambda one: one.id)

    def _judge(self, group: str, members: list[ScoredSample]) -> None:
        self.scorer.forget(group)
        errors = [member.outcome.error for member in members]
        self.failed_rewards += sum(error is not None for error in errors)
        if all(errors):
            self.ledger.fail(group, f"reward_{errors[0]}")
            self._let_go(group, f"failed:reward_{errors[0]}", f"reward_{errors[0]}")
        elif rule := self.algorithm.filter_rule([member.outcome.reward for member in members]):
            self.ledger.filter(group, rule)
            self._let_go(group, f"filtered:{rule}", rule)
            self.filtered += 1
        elif self.scorer.concurrent:
            self.ledger.finish(group, sum(member.tokens for member in members if member.outcome.error is None))

    def _let_go(self, group: str, ended: str, reason: str) -> None:
        """A group that will not be trained leaves the queue."""
        self.folder.log_groups(self.row, [group], ended)
        members = self.scored.pop(group)
        self.queue.drop([member.id for member in members], reason)
        self._ended += members
