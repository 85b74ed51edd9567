"""Keep the staleness bound: which groups may be admitted, which may be trained, and how each ended. A state machine.

    admit ──► in flight ──finish──► finished ──train──► trained
                  │                     │
                  └──────fail / filter──┴─────────────► failed(why) / filtered(rule)

The policy version is the number of published optimizer updates. A group's age counts from the version at which it was
admitted, which is at most that of its oldest token. Two gates keep the bound s, *admit* and *advance*. Both check the
same condition: can all untrained groups be trained in time, with `groups_per_step` groups per version? A group of age a
can be trained in the current version or in the next s - a, so the condition is that for every age k

    untrained groups of age >= k  <=  places left in this version + (s - k) * groups_per_step.

A young group that finished early is trained before an older one only while this holds. (No token of a group's samples
is older than its admission, so the bound on the group's age also bounds the age of every token.)

With `tokens_per_step` a version may train fewer groups: the oldest finished groups that hold that many tokens, plus the
groups that must be trained now for older ones to be in time, up to `groups_per_step`. The gates count places, not
tokens: a version has `groups_per_step` places, and those that one version does not use are available later. But if as
many groups were admitted as there are places, every version would need all of its places, and no step could be small.
Admission therefore also aims at (s + 1) steps of the expected size: the number of groups that reach the threshold, at
the mean length of the groups finished so far.

The oldest groups are trained first, so training the first r finished groups removes min(r, finished of age >= k) groups
of age >= k. The number of groups that may be trained (`num_ready`) and must be trained (`num_due`) follows from the
number of groups of each age.

Cost, for n groups in progress: a change of state and `may_admit` O(1); `may_advance`, `is_enough` O(s); `ready` and
`enough`, once a step, O(n log n). With `tokens_per_step`, `is_enough` is O(n log n), too, from when finished groups
hold that many tokens.

Invariants (property-tested in tests/stalesync/policy/test_staleness.py):
1. No group is trained at an age above s.
2. Every admitted group ends in exactly one state: trained, filtered or failed, with the rule or the reason; none is
   lost, none is trained twice.
3. No deadlock: whenever no group is in flight or finished, a group may be admitted.
4. At s = 0 a version admits exactly its own batch, and ends only when every group of it has ended.
5. The groups returned by `enough` can be trained, and then the next version can be published; they are at most
   `groups_per_step`, and without the last one tokens would be missing or the next version could not be published."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any


@dataclass
class StalenessLedger:
    """Track groups by id. ``max_staleness``: the bound s in versions; a version trains ``groups_per_step`` groups or
    fewer, if finished groups hold ``tokens_per_step`` tokens (None: no such threshold)."""

    max_staleness: int
    groups_per_step: int
    tokens_per_step: int | None = None
    version: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    """Group id → version at admission; the same for `finished`."""
    finished: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    """Finished group → tokens of its prompts and responses, as passed to `finish`"""
    ended: Counter[str] = field(default_factory=Counter)
    """trained, filtered:<rule>, failed:<why> → groups."""
    ages: Counter[int] = field(default_factory=Counter)
    """Age in versions when trained → groups."""
    trained_now: int = 0
    """Groups trained since the last advance."""
    _num_training: int | None = None
    """Number of groups being trained, after which the version ends; None: no training in progress"""
    _totals: tuple[int, int] = (0, 0)
    """Number of groups that have finished since the start, and their tokens"""
    _finished_tokens: int = 0
    """Tokens of the groups that are finished now"""
    _sorted: list[str] | None = None
    """What `_oldest_first` returned; None: `finished` has changed since"""
    _num_untrained_of: Counter[int] = field(default_factory=Counter)
    """Version at admission → groups in flight or finished; `_num_finished_of`: finished"""
    _num_finished_of: Counter[int] = field(default_factory=Counter)

    @property
    def num_untrained(self) -> int:
        return len(self.in_flight) + len(self.finished)

    @property
    def may_admit(self) -> int:
        """Number of further groups that may be admitted now."""
        places = (
            self._places if self._num_training is None else self._num_training
        ) + self.max_staleness * self.groups_per_step
        return max(0, min(places, (self.max_staleness + 1) * self.expected_groups) - self.num_untrained)

    @property
    def expected_groups(self) -> int:
        """Expected number of groups of a step, from the mean length of finished groups; at first `groups_per_step`."""
        groups, tokens = self._totals
        if self.tokens_per_step is None or not tokens:
            return self.groups_per_step
        return min(self.groups_per_step, ceil(self.tokens_per_step * groups / tokens))

    def next_steps(self, count: int) -> list[int]:
        """Return the expected versions of training of the next groups to be admitted, behind those in progress."""
        behind, step = self.num_untrained, self.expected_groups
        return [self.version + (behind + number) // step for number in range(count)]

    def admit(self, groups: Iterable[str]) -> None:
        room = self.may_admit
        for count, group in enumerate(groups, start=1):
            assert group not in self.in_flight and group not in self.finished, f"group {group} is admitted already"
            assert count <= room, f"group {group} could not be trained within {self.max_staleness} versions"
            self.in_flight[group] = self.version
            self._num_untrained_of[self.version] += 1

    def finish(self, group: str, tokens: int = 0) -> None:
        """Mark a group as finished: its samples are all generated and, if samples are scored while others are generated
        (`AdmissionSpec.scores_overlapped`), also scored. ``tokens``: of its prompts and responses; of scored samples,
        only of those whose reward did not fail."""
        self._insert_finished(group, self.in_flight.pop(group), tokens)
        groups, tokens_before = self._totals
        self._totals = groups + 1, tokens_before + tokens

    def ready(self) -> list[str]:
        """Return the finished groups that may be trained in this version, oldest first; groups of the same age by
        name, so that the order in which they finished has no effect."""
        return self._oldest_first()[: self.num_ready]

    def enough(self) -> list[str]:
        """Return the groups with which a step may begin now, oldest first; empty if others must finish first."""
        count = self._num_enough
        return self._oldest_first()[:count] if count else []

    @property
    def is_enough(self) -> bool:
        return self._num_enough > 0

    def begin_training(self, num_groups: int) -> None:
        """Fix the number of groups that this version trains; `train` will name them. Groups admitted in between
        cannot use the remaining places of this version."""
        assert num_groups <= self._places
        self._num_training = num_groups

    def train(self, groups: Iterable[str]) -> None:
        self._num_training = None
        for group in groups:
            age = self.version - self._remove_finished(group)
            assert age <= self.max_staleness, f"group {group} is {age} versions old; the bound is {self.max_staleness}"
            self.ages[age] += 1
            self.ended["trained"] += 1
            self.trained_now += 1
        assert self._in_time(self.version, self._places), "an older group lost its place"

    def lag(self, group: str) -> int:
        """Return the number of versions since a finished group was admitted."""
        return self.version - self.finished[group]

    def filter(self, group: str, rule: str) -> None:
        """End a group that a rule of the algorithm excludes from training."""
        self._end(group, f"filtered:{rule}")

    def fail(self, group: str, why: str) -> None:
        """End a group that cannot be trained."""
        self._end(group, f"failed:{why}")

    @property
    def may_advance(self) -> bool:
        """Whether the next version may be published: every untrained group could still be trained in time."""
        return self._in_time(self.version + 1, self.groups_per_step)

    def advance(self) -> int:
        """Publish the next policy version and return it."""
        assert self.may_advance, "an untrained group could not be trained in time"
        self.version += 1
        self.trained_now = 0
        return self.version

    @property
    def waits_for_older(self) -> bool:
        """Whether enough groups are finished for a step, but some must not be trained before older ones."""
        held = self.tokens_per_step is not None and self._finished_tokens >= self.tokens_per_step
        return (held or len(self.finished) >= self._places) and not self.is_enough

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON, between two versions."""
        assert not self.trained_now, "a version is saved when it is published"
        state = {"version": self.version, "in_flight": self.in_flight, "finished": self.finished}
        ages = {str(age): count for age, count in self.ages.items()}
        return state | {"tokens": self.tokens, "sizes": list(self._totals), "ended": dict(self.ended), "ages": ages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
        """Return the number of groups since the start by how they ended."""
        return {f"staleness/groups/{name}": float(count) for name, count in self.ended.items()}

    @property
    def _places(self) -> int:
        return self.groups_per_step - self.trained_now

    @property
    def _num_enough(self) -> int:
        """Number of the oldest finished groups that a step trains; 0: others must finish first."""
        ready = self.num_ready
        if self.tokens_per_step is not None and self._finished_tokens >= self.tokens_per_step:
            held, due = 0, self.num_due
            for count, group in enumerate(self._oldest_first()[:ready] if due <= ready else (), start=1):
                held += self.tokens[group]
                if held >= self.tokens_per_step and count >= due:
                    return count
        return ready if ready >= self._places else 0

    def _oldest_first(self) -> list[str]:
        """Return the finished groups by age, groups of the same age by name. They are sorted only when they are asked
        for: keeping them sorted would move on average half of them for each group that finishes."""
        if self._sorted is None:
            self._sorted = sorted(sorted(self.finished), key=self.finished.__getitem__)  # stable: of one age by name
        return self._sorted

    @property
    def num_ready(self) -> int:
        """Number of the oldest finished groups that may be trained in this version such that every other group can
        still be trained in time: r of them if, for every age k, r <= finished of age >= k + spare places."""
        ready = min(self._places, len(self.finished))
        for untrained, finished, later_places in self._by_min_age():
            spare = self._places + later_places - untrained
            ready = min(ready, finished + spare if spare >= 0 else 0)
        return ready

    @property
    def num_due(self) -> float:
        """Number of the oldest finished groups that must be trained before the next version may be published; infinite
        if groups in flight must be trained, too."""
        due: float = 0
        for untrained, finished, later_places in self._by_min_age():
            excess = untrained - later_places
            due = max(due, excess if excess <= finished else inf)
        return due

    def _by_min_age(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each age k from s down to 0: the number of untrained and of finished groups of age >= k, and of
        places for them in later versions."""
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
        self._sorted = None

    def _remove_finished(self, group: str) -> int:
        """Return the version at which it was admitted."""
        version = self.finished.pop(group)
        self._finished_tokens -= self.tokens.pop(group)
        _decrement(self._num_untrained_of, version)
        _decrement(self._num_finished_of, version)
        self._sorted = None
        return version


def _decrement(counts: Counter[int], version: int) -> None:
    """Decrement a count and remove it at 0, so that the counts do not grow during the run."""
    counts[version] -= 1
    if not counts[version]:
        del counts[version]
