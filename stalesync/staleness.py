"""The staleness bound as a state machine: which groups may be admitted, which may be trained, how each ended.

    admit ──► in flight ──finish──► finished ──train──► trained
                  │                     │
                  └──────fail / filter──┴─────────────► failed(why) / filtered(rule)

The policy version is the number of optimizer updates that were published. A group's age counts from the version at
which it was admitted, that of its oldest token. Two gates keep the bound s, *admit* and *advance*, and both ask one
question: can everything that is still untrained be trained in time, at `groups_per_step` groups a version? A group of
age a has s - a versions left beside the present one, so it can exactly if for every age k

    untrained groups of age >= k  <=  places left in this version + (s - k) * groups_per_step.

A young group that finished early is trained before an older one only while that stays true. (The oldest token of a
group's samples is never older than its admission, so a bound on this age is a bound on theirs.)

With `tokens_per_step` a version may train fewer groups: the oldest that are finished and hold that many tokens, and as
many more as older groups need to be in time, up to `groups_per_step`. The gates count places, not tokens: what a
version may train at most is what makes up for what others have not trained. But if as many groups were admitted as
there are places, every version would need all of its own, and no step could be small. So beside the gates admission
aims at (s + 1) steps of the size that the threshold makes of groups as long as those that have finished.

As the oldest are trained first, the first r finished groups leave min(r, finished of age >= k) fewer of age >= k: how
many may be trained (`num_ready`) and must be (`num_due`) follows from the number of groups of each age.

Cost, for n groups under way: `may_admit` O(1); `may_advance`, `is_enough` O(s), with `tokens_per_step` at most
O(s + groups_per_step); a change of state O(log n) and a move within a sorted list.

Invariants (property-tested in tests/stalesync/test_staleness.py):
1. No group is trained at an age above s.
2. Every admitted group ends in exactly one state: trained, filtered or failed, with the rule or the reason; none is
   lost, none is trained twice.
3. No deadlock: whenever nothing is in flight and nothing is finished, a group may be admitted.
4. At s = 0 a version admits exactly its own batch, and is left only when every group of it has ended.
5. The groups that `enough` names can be trained, and the next version published thereupon; they are no more than
   `groups_per_step`, and without the last one tokens would be missing or the next version could not be published.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any


@dataclass
class StalenessLedger:
    """Groups by id. ``max_staleness`` s in versions; a version trains ``groups_per_step`` groups or, if finished groups
    hold ``tokens_per_step`` tokens (None: no such threshold), fewer."""

    max_staleness: int
    groups_per_step: int
    tokens_per_step: int | None = None
    version: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    """Group id → version at admission; likewise `finished`."""
    finished: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    """Finished group → trainable tokens of its prompts and responses"""
    ended: Counter[str] = field(default_factory=Counter)
    """trained, filtered:<rule>, failed:<why> → groups."""
    ages: Counter[int] = field(default_factory=Counter)
    """Age in versions when trained → groups."""
    trained_now: int = 0
    """Groups trained since the last advance."""
    _num_training: int | None = None
    """Groups that are being trained, and after which the version ends; None: none are"""
    _totals: tuple[int, int] = (0, 0)
    """Groups that have ever finished, and their tokens"""
    _finished_tokens: int = 0
    """Of the groups that are finished now"""
    _oldest_first: list[tuple[int, str]] = field(default_factory=list)
    """(version at admission, group) of finished groups, sorted"""
    _num_untrained_of: Counter[int] = field(default_factory=Counter)
    """Version at admission → groups in flight or finished; `_num_finished_of`: finished"""
    _num_finished_of: Counter[int] = field(default_factory=Counter)

    @property
    def num_untrained(self) -> int:
        """Groups in flight or finished."""
        return len(self.in_flight) + len(self.finished)

    @property
    def may_admit(self) -> int:
        """How many further groups may be admitted now."""
        places = (
            self._places if self._num_training is None else self._num_training
        ) + self.max_staleness * self.groups_per_step
        return max(0, min(places, (self.max_staleness + 1) * self.expected_groups) - self.num_untrained)

    @property
    def expected_groups(self) -> int:
        """Groups of a step, estimated from those that have finished; `groups_per_step` until one has."""
        groups, tokens = self._totals
        if self.tokens_per_step is None or not tokens:
            return self.groups_per_step
        return min(self.groups_per_step, ceil(self.tokens_per_step * groups / tokens))

    def admit(self, groups: Iterable[str]) -> None:
        """Admits groups at the present version."""
        for group in groups:
            assert group not in self.in_flight and group not in self.finished, f"group {group} is admitted already"
            assert self.may_admit > 0, f"group {group} could not be trained within {self.max_staleness} versions"
            self.in_flight[group] = self.version
            self._num_untrained_of[self.version] += 1

    def finish(self, group: str, tokens: int = 0) -> None:
        """Every sample of the group is generated and scored. ``tokens``: of its prompts and responses."""
        self._insert_finished(group, self.in_flight.pop(group), tokens)
        groups, tokens_before = self._totals
        self._totals = groups + 1, tokens_before + tokens

    def ready(self) -> list[str]:
        """Returns the finished groups that may be trained in this version, oldest first; of one age by name, so that
        the order in which they finished decides nothing."""
        return [group for _, group in self._oldest_first[: self.num_ready]]

    def enough(self) -> list[str]:
        """Returns the groups with which a step may begin now, oldest first; empty if others must finish first."""
        return [group for _, group in self._oldest_first[: self._num_enough]]

    @property
    def is_enough(self) -> bool:
        """Whether a step may begin now."""
        return self._num_enough > 0

    def begin_training(self, num_groups: int) -> None:
        """Closes this version to all but ``num_groups`` groups, which `train` will name: a group that is admitted until
        then cannot have the places that they leave."""
        assert num_groups <= self._places
        self._num_training = num_groups

    def train(self, groups: Iterable[str]) -> None:
        """Marks finished groups as trained in this version."""
        self._num_training = None
        for group in groups:
            age = self.version - self._remove_finished(group)
            assert age <= self.max_staleness, f"group {group} is {age} versions old; the bound is {self.max_staleness}"
            self.ages[age] += 1
            self.ended["trained"] += 1
            self.trained_now += 1
        assert self._in_time(self.version, self._places), "an older group lost its place"

    def lag(self, group: str) -> int:
        """Versions since a finished group was admitted."""
        return self.version - self.finished[group]

    def filter(self, group: str, rule: str) -> None:
        """Ends a group that a rule of the algorithm leaves out of training."""
        self._end(group, f"filtered:{rule}")

    def fail(self, group: str, why: str) -> None:
        """Ends a group that cannot be trained."""
        self._end(group, f"failed:{why}")

    @property
    def may_advance(self) -> bool:
        """Whether the next version may be published: every untrained group could still be trained in time."""
        return self._in_time(self.version + 1, self.groups_per_step)

    def advance(self) -> int:
        """Publishes the next policy version and returns it."""
        assert self.may_advance, "an untrained group could not be trained in time"
        self.version += 1
        self.trained_now = 0
        return self.version

    @property
    def waits_for_older(self) -> bool:
        """Whether enough groups are finished for a step, but some may not be trained before older ones."""
        held = self.tokens_per_step is not None and self._finished_tokens >= self.tokens_per_step
        return (held or len(self.finished) >= self._places) and not self.is_enough

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON, between two versions."""
        assert not self.trained_now, "a version is saved when it is published"
        state = {"version": self.version, "in_flight": self.in_flight, "finished": self.finished}
        ages = {str(age): count for age, count in self.ages.items()}
        return state | {"tokens": self.tokens, "sizes": list(self._totals), "ended": dict(self.ended), "ages": ages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a ledger into this empty one."""
        self.version, self.in_flight = state["version"], dict(state["in_flight"])
        groups, tokens = state["sizes"]
        self._totals = groups, tokens
        self._num_untrained_of.update(self.in_flight.values())
        for group, version in state["finished"].items():
            self._num_untrained_of[version] += 1
            self._insert_finished(group, version, state["tokens"][group])
        self.ended = Counter(state["ended"])
        self.ages = Counter({int(age): count for age, count in state["ages"].items()})

    def metrics(self) -> dict[str, float]:
        """Ages of trained groups, and how many groups have ended in which way."""
        trained = sum(self.ages.values())
        mean = sum(age * count for age, count in self.ages.items()) / trained if trained else 0.0
        metrics = {"staleness/mean": mean, "staleness/max": float(max(self.ages, default=0))}
        return metrics | {f"staleness/groups/{name}": float(count) for name, count in self.ended.items()}

    @property
    def _places(self) -> int:
        return self.groups_per_step - self.trained_now

    @property
    def _num_enough(self) -> int:
        """Of the oldest finished groups, how many make a step; 0: others must finish first."""
        ready = self.num_ready
        if self.tokens_per_step is not None and self._finished_tokens >= self.tokens_per_step:
            held, due = 0, self.num_due
            for count, (_, group) in enumerate(self._oldest_first[:ready], start=1):
                held += self.tokens[group]
                if held >= self.tokens_per_step and count >= due:
                    return count
        return ready if ready >= self._places else 0

    @property
    def num_ready(self) -> int:
        """Of the oldest finished groups, how many may be trained in this version and leave every other group in time:
        the first r leave its place to every group of age >= k if r <= finished of age >= k + places to spare."""
        most = min(self._places, len(self.finished))
        for untrained, finished, later_places in self._by_least_age():
            spare = self._places + later_places - untrained
            most = min(most, finished + spare if spare >= 0 else 0)
        return most

    @property
    def num_due(self) -> float:
        """Of the oldest finished groups, how many must be trained before the next version may be published; infinite
        if groups in flight must be, too."""
        due: float = 0
        for untrained, finished, later_places in self._by_least_age():
            excess = untrained - later_places
            due = max(due, excess if excess <= finished else inf)
        return due

    def _by_least_age(self) -> Iterator[tuple[int, int, int]]:
        """Yields for each age k from s down to 0: untrained groups of age >= k, finished ones, and the places that
        these have in later versions."""
        untrained = finished = 0
        for age in range(self.max_staleness, -1, -1):
            untrained += self._num_untrained_of[self.version - age]
            finished += self._num_finished_of[self.version - age]
            yield untrained, finished, (self.max_staleness - age) * self.groups_per_step

    def _in_time(self, version: int, places: int) -> bool:
        """Whether all untrained groups can be trained in time from ``version`` on, which has ``places`` left."""
        older = 0
        for age in range(self.max_staleness + 1, -1, -1):
            older += self._num_untrained_of[version - age]
            later_places = (self.max_staleness - age) * self.groups_per_step
            if older > (places + later_places if age <= self.max_staleness else 0):
                return False
        return True

    def _end(self, group: str, name: str) -> None:
        if group in self.in_flight:
            _decrement(self._num_untrained_of, self.in_flight.pop(group))
        else:
            self._remove_finished(group)
        self.ended[name] += 1

    def _insert_finished(self, group: str, version: int, tokens: int) -> None:
        self.finished[group] = version
        self.tokens[group] = tokens
        self._finished_tokens += tokens
        self._num_finished_of[version] += 1
        insort(self._oldest_first, (version, group))

    def _remove_finished(self, group: str) -> int:
        """Returns the version at which it was admitted."""
        version = self.finished.pop(group)
        self._finished_tokens -= self.tokens.pop(group)
        _decrement(self._num_untrained_of, version)
        _decrement(self._num_finished_of, version)
        del self._oldest_first[bisect_left(self._oldest_first, (version, group))]
        return version


def _decrement(counts: Counter[int], version: int) -> None:
    """Forgets a version of which nothing is left, so that the counts do not grow with the run."""
    counts[version] -= 1
    if not counts[version]:
        del counts[version]
