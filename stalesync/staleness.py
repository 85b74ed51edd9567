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

With `tokens_per_step` a version may train fewer groups: the oldest that are finished and hold so many tokens, and as
many more as older groups need to be in time, up to `groups_per_step`. The gates count places, not tokens: what a
version may train at most is what makes up for what others have not trained. But if as many groups were admitted as
there are places, every version would need all of its own, and no step could be small. So beside the gates admission
aims at (s + 1) steps of the size that the threshold makes of groups as long as those that have finished.

Invariants (property-tested in tests/stalesync/test_staleness.py):
1. No group is trained at an age above s.
2. Every admitted group ends in exactly one state: trained, filtered or failed, with the rule or the reason; none is
   lost, none is trained twice.
3. No deadlock: whenever nothing is in flight and nothing is finished, a group may be admitted.
4. At s = 0 a version admits exactly its own batch, and is left only when every group of it has ended.
5. What `enough` names can be trained, and the next version published thereupon; it is no more than `groups_per_step`
   groups, and without its last one it would lack tokens or the next version could not be published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import Any


@dataclass
class StalenessLedger:
    """Groups by id. ``max_staleness`` s in versions, ``groups_per_step`` groups trained a version, at most where
    ``tokens_per_step`` (None: all of them) are enough."""

    max_staleness: int
    groups_per_step: int
    tokens_per_step: int | None = None
    version: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    """Group id → version at admission; likewise `finished`."""
    finished: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    """Of finished groups: prompts and responses that can be trained"""
    sizes: list[int] = field(default_factory=lambda: [0, 0])
    """How many groups have finished, and their tokens together"""
    ended: Counter[str] = field(default_factory=Counter)
    """trained, filtered:<rule>, failed:<why> → groups."""
    ages: Counter[int] = field(default_factory=Counter)
    """Age in versions when trained → groups."""
    trained_now: int = 0
    """Groups trained since the last advance."""

    def may_admit(self) -> int:
        """How many further groups may start now."""
        places = self._places + self.max_staleness * self.groups_per_step
        return max(0, min(places, (self.max_staleness + 1) * self.expected_groups) - len(self._untrained))

    @property
    def expected_groups(self) -> int:
        """Of a step, by the groups that have finished so far; until one has, as many as it may have."""
        groups, tokens = self.sizes
        if self.tokens_per_step is None or not tokens:
            return self.groups_per_step
        return min(self.groups_per_step, ceil(self.tokens_per_step * groups / tokens))

    def admit(self, groups: Iterable[str]) -> None:
        for group in groups:
            assert group not in self.in_flight and group not in self.finished, f"group {group} is admitted already"
            assert self.may_admit() > 0, f"group {group} could not be trained within {self.max_staleness} versions"
            self.in_flight[group] = self.version

    def finish(self, group: str, tokens: int = 0) -> None:
        """Every sample of the group is generated and scored. ``tokens``: of its prompts and responses."""
        self.finished[group] = self.in_flight.pop(group)
        self.tokens[group] = tokens
        self.sizes = [self.sizes[0] + 1, self.sizes[1] + tokens]

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

    def enough(self) -> list[str]:
        """Groups with which a step may begin now, oldest first; none: others must finish first."""
        ready, held = self.ready(), 0
        if self.tokens_per_step is not None:
            left = dict(self._untrained)
            for count, group in enumerate(ready, start=1):
                held += self.tokens[group]
                del left[group]
                if held >= self.tokens_per_step and self._in_time(
                    list(left.values()), self.version + 1, self.groups_per_step
                ):
                    return ready[:count]
        return ready if len(ready) >= self._places else []

    def train(self, groups: Iterable[str]) -> None:
        for group in groups:
            age = self.version - self.finished.pop(group)
            del self.tokens[group]
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
        self.tokens.pop(group, None)
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
        tokens = self.tokens_per_step is not None and sum(self.tokens.values()) >= self.tokens_per_step
        return (tokens or len(self.finished) >= self._places) and not self.enough()

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON, between two versions."""
        assert not self.trained_now, "a version is saved when it is published"
        state = {"version": self.version, "in_flight": self.in_flight, "finished": self.finished}
        ages = {str(age): count for age, count in self.ages.items()}
        return state | {"tokens": self.tokens, "sizes": self.sizes, "ended": dict(self.ended), "ages": ages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version, self.in_flight, self.finished = state["version"], state["in_flight"], state["finished"]
        self.tokens, self.sizes = state["tokens"], state["sizes"]
        self.ended = Counter(state["ended"])
        self.ages = Counter({int(age): count for age, count in state["ages"].items()})

    def metrics(self) -> dict[str, float]:
        trained = sum(self.ages.values())
        mean = sum(age * count for age, count in self.ages.items()) / trained if trained else 0.0
        metrics = {"staleness/mean": mean, "staleness/max": float(max(self.ages, default=0))}
        return metrics | {f"staleness/groups/{name}": float(count) for name, count in self.ended.items()}
