"""Rank a step's groups by historical length into classes, and share the engines out to these. Pure.

    expected lengths ─► classes of as many groups each ─► work of a class ─► time on n engines ─► shares of the engines

The second tier of HistoPipe (RhymeRL, arXiv 2508.18588): a class of long responses gets more engines, by a search over
time curves. The curve here is modelled: a class begins all its responses that fit, and a decode step takes 1 + c x
sequences, in units of a step without sequences; c such that one with all slots takes twice as long. So its longest
response takes as many steps as it has tokens, all responses together take tokens / (engines x slots) steps or more, and
every token adds c:

    time(n) = max(longest, tokens / (n x slots)) + c x tokens / n

Invariants (property-tested in tests/rollout/orders/test_length_classes.py): every class has a group, and at least one
engine; every engine has one class; classes are in order of length; no other shares have a shorter longest class, equal
ones among them. Cost, for n groups, C classes and E engines: O(n log n + E log C)."""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import NamedTuple


class ExpectedLength(NamedTuple):
    """Tokens that a group's responses had in an earlier epoch. ``longest``: of the longest."""

    mean: float
    longest: float


@dataclass(frozen=True)
class HistoPipeSpec:
    """The settings of HistoPipe. ``num_engines``: of the run; ``engine_slots``: requests that an engine decodes at a
    time; ``group_size``: requests of a group; ``num_classes``: number of classes, at most; 1: engines are not shared
    out; ``search``: whether shares are searched for; else they are equal; ``growth``: length, relative to the expected
    one, beyond which a request of the tail of its class moves."""

    num_engines: int
    engine_slots: int
    group_size: int
    num_classes: int = 4
    search: bool = True
    growth: float = 1.5


@dataclass(frozen=True)
class ClassPlan:
    """Classes of a step. ``bounds``: tokens from which a group is in the next class; ``shares``: engines of each class;
    ``median``: of the groups' lengths in tokens."""

    bounds: tuple[float, ...]
    shares: tuple[int, ...]
    median: float

    def class_of(self, tokens: float) -> int:
        """Return the class of a group whose responses are expected to have ``tokens``; 0: the shortest."""
        return bisect_right(self.bounds, tokens)

    def class_of_engine(self, engine: int, *, ascending: bool) -> int:
        """Return the class of an engine. ``ascending``: the first engines have the shortest class, else longest."""
        last_engines = list(accumulate(self.shares))
        place = engine if ascending else last_engines[-1] - 1 - engine
        return bisect_right(last_engines, place)


def plan_classes(expected: Sequence[ExpectedLength], spec: HistoPipeSpec) -> ClassPlan:
    """Divide groups into classes of as many groups each, as far as lengths differ, and the engines among these."""
    means = sorted(one.mean for one in expected)
    count = min(spec.num_classes, spec.num_engines, len(means))
    cuts = {means[len(means) * number // count] for number in range(1, count)}
    bounds = tuple(sorted(cuts - {means[0]}))
    work = [ClassWork(0.0, 0.0)] * (len(bounds) + 1)
    for one in expected:
        number = bisect_right(bounds, one.mean)
        work[number] = work[number].plus(one.mean * spec.group_size, one.longest)
    if spec.search:
        shares = share_engines([one.curve(spec) for one in work], spec.num_engines)
    else:
        shares = equal_shares(len(work), spec.num_engines)
    return ClassPlan(bounds, tuple(shares), median(means))


class ClassWork(NamedTuple):
    """Tokens of all responses of a class, and of its longest."""

    tokens: float
    longest: float

    def plus(self, tokens: float, longest: float) -> "ClassWork":
        return ClassWork(self.tokens + tokens, max(self.longest, longest))

    def curve(self, spec: HistoPipeSpec) -> Callable[[int], float]:
        """Return the time of the class by its number of engines, in decode steps without sequences."""

        def time_on(engines: int) -> float:
            steps = max(self.longest, self.tokens / (engines * spec.engine_slots))
            return steps + 1 / spec.engine_slots * self.tokens / engines

        return time_on


def share_engines(curves: Sequence[Callable[[int], float]], num_engines: int) -> list[int]:
    """Share engines out such that the longest class takes as little time as possible: each engine to the class that
    takes longest so far, which no other division can beat where no curve rises. ``curves``: time of each class by its
    number of engines; at most ``num_engines`` classes."""
    assert 0 < len(curves) <= num_engines, f"{len(curves)} classes for {num_engines} engines"
    shares = [1] * len(curves)
    slowest_first = [(-curve(1), number) for number, curve in enumerate(curves)]
    heapq.heapify(slowest_first)
    for _ in range(num_engines - len(curves)):
        number = slowest_first[0][1]
        shares[number] += 1
        heapq.heapreplace(slowest_first, (-curves[number](shares[number]), number))
    return shares


def equal_shares(num_classes: int, num_engines: int) -> list[int]:
    ends = [num_engines * number // num_classes for number in range(num_classes + 1)]
    return [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
