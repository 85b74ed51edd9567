"""Which groups may start, which may be trained, and what became of each: the staleness bound as a state machine.

    admit ──► in flight ──finish──► finished ──train──► trained
                  │                     │
                  └──────fail / filter──┴─────────────► failed(why) / filtered(rule)

The policy version is the number of optimizer updates that were published. A group's age counts from the version at
which it was admitted, that of its oldest token. Two gates keep the bound s, *admit* and *advance*, and both ask one
question: can everything that is still to be trained be trained in time, at `groups_per_step` groups a version? A group
of age a has s - a versions left beside the present one, so it can exactly if for every age k

    untrained groups of age >= k  <=  places left in this version + (s - k) * groups_per_step.

A young group that finished early is trained before an older one only while that stays true. (The oldest token of a
group's samples is never older than its admission, so a bound on this age is a bound on theirs.)

Invariants (property-tested in tests/stalesync/test_staleness.py):
1. No group is trained at an age above s.
2. Every admitted group ends in exactly one state: trained, filtered or failed, with the rule or the reason; none is
   lost, none is trained twice.
3. No deadlock: whenever nothing is in flight and nothing is finished, a group may be admitted.
4. At s = 0 a version admits exactly its own batch, and is left only when every group of it has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StalenessLedger:
    """Groups by id. ``max_staleness`` s in versions, ``groups_per_step`` groups trained a version."""

    max_staleness: int
    groups_per_step: int
    version: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    """Group id → version at admission; likewise `finished`."""
    finished: dict[str, int] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    """trained, filtered:<rule>, failed:<why> → groups."""
    ages: Counter[int] = field(default_factory=Counter)
    """Age in versions when trained → groups."""
    trained_now: int = 0
    """Groups trained since the last advance."""

    def may_admit(self) -> int:
        """How many further groups may start now."""
        return max(0, self._places + self.max_staleness * self.groups_per_step - len(self._untrained))

    def admit(self, groups: Iterable[str]) -> None:
        for group in groups:
            assert group not in self.in_flight and group not in self.finished, f"group {group} is admitted already"
            assert self.may_admit() > 0, f"group {group} could not be trained within {self.max_staleness} versions"
            self.in_flight[group] = self.version

    def finish(self, group: str) -> None:
        """Every sample of the group is generated and scored."""
        self.finished[group] = self.in_flight.pop(group)

    def ready(self) -> list[str]:
        """Finished groups that may be trained in this version, oldest first; of one age by name, so that who was done
        first decides nothing."""
        chosen: list[str] = []
        left = self._untrained
        for group in sorted(self.finished, key=lambda group: (self.finished[group], group)):
            without = [admitted for other, admitted in left.items() if other != group]
            if len(chosen) < self._places and self._in_time(without, self.version, self._places - len(chosen) - 1):
                chosen.append(group)
                del left[group]
        return chosen

    def train(self, groups: Iterable[str]) -> None:
        for group in groups:
            age = self.version - self.finished.pop(group)
            assert age <= self.max_staleness, f"group {group} is {age} versions old; the bound is {self.max_staleness}"
            self.ages[age] += 1
            self.ended["trained"] += 1
            self.trained_now += 1
        assert self._in_time(list(self._untrained.values()), self.version, self._places), (
            "an older group lost its place"
        )

    def lag(self, group: str) -> int:
        """Versions since a finished group was admitted."""
        return self.version - self.finished[group]

    def filter(self, group: str, rule: str) -> None:
        self._end(group, f"filtered:{rule}")

    def fail(self, group: str, why: str) -> None:
        self._end(group, f"failed:{why}")

    def _end(self, group: str, name: str) -> None:
        home = self.in_flight if group in self.in_flight else self.finished
        del home[group]
        self.ended[name] += 1

    def may_advance(self) -> bool:
        """Whether the next version may be published: all that is untrained could still be trained in time."""
        return self._in_time(list(self._untrained.values()), self.version + 1, self.groups_per_step)

    @property
    def _untrained(self) -> dict[str, int]:
        return self.in_flight | self.finished

    @property
    def _places(self) -> int:
        return self.groups_per_step - self.trained_now

    def _in_time(self, admitted: list[int], version: int, places: int) -> bool:
        ages = Counter(version - start for start in admitted)
        older = 0
        for age in range(max(ages, default=0), -1, -1):
            older += ages[age]
            if age > self.max_staleness and older:
                return False
            if older > places + (self.max_staleness - age) * self.groups_per_step:
                return False
        return True

    def advance(self) -> int:
        """Publishes the next policy version and returns it."""
        assert self.may_advance(), "an untrained group could not be trained in time"
        self.version += 1
        self.trained_now = 0
        return self.version

    @property
    def waits_for_older(self) -> bool:
        """Whether enough groups are finished for a step, and some must let older ones go before."""
        return len(self.finished) >= self._places > len(self.ready())

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON, between two versions."""
        assert not self.trained_now, "a version is saved when it is published"
        state = {"version": self.version, "in_flight": self.in_flight, "finished": self.finished}
        ages = {str(age): count for age, count in self.ages.items()}
        return state | {"ended": dict(self.ended), "ages": ages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self.in_flight, self.finished = state["version"], state["in_flight"], state["finished"]
        self.ended = Counter(state["ended"])
        self.ages = Counter({int(age): count for age, count in state["ages"].items()})

    def metrics(self) -> dict[str, float]:
        trained = sum(self.ages.values())
        mean = sum(age * count for age, count in self.ages.items()) / trained if trained else 0.0
        metrics = {"staleness/mean": mean, "staleness/max": float(max(self.ages, default=0))}
        return metrics | {f"staleness/groups/{name}": float(count) for name, count in self.ended.items()}
