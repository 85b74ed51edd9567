"""Merge the metrics of one step from many ranks into one flat dict.

Names follow verl: `actor/pg_loss`, `critic/rewards/mean`, `timing_s/gen`, `perf/throughput`. How two ranks' figures of
one name become one is decided by the name (`rule_of`) or stated once by the caller:

    mean      weighted by the count that came with it (tokens, samples); a count of 0 adds nothing
    max, min  the extreme
    sum       counts: `num_…`, `…_count`, `total_…`, `…/total`
    seconds   `timing_s/…`: a rank's own pieces add up, of several ranks the slowest counts (that is the wall clock)

Invariants:
1. Folding the ranks' parts gives the same in any order and any grouping; but for `seconds` it is what one accumulator
   that saw everything would hold.
2. A name has one rule; a second one is refused.
3. A mean that has seen no weight is absent from the result, never 0 and never NaN."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple, SupportsFloat

Rule = Literal["mean", "max", "min", "sum", "seconds"]


class MetricState(NamedTuple):
    """Accumulated state of one metric. `value` is the weighted sum for a mean, the value itself for other rules."""

    rule: Rule
    value: float
    weight: float


@lru_cache(maxsize=4096)
def rule_of(name: str) -> Rule:
    """Return the rule by which values of the metric `name` are merged, from the name alone."""
    last = name.rsplit("/", 1)[-1]
    if name.startswith("timing_s/"):
        return "seconds"
    if last == "mean" or last.endswith("_mean"):
        return "mean"
    if name.startswith("memory/") or last == "max" or last.startswith("max_") or last.endswith("_max"):
        return "max"
    if last == "min" or last.startswith("min_") or last.endswith("_min"):
        return "min"
    if last in ("count", "total") or last.startswith(("num_", "total_")) or last.endswith(("_count", "_total")):
        return "sum"
    return "mean"


class Metrics:
    """Accumulate one step's metrics on one rank; `merge` adds those of other ranks."""

    def __init__(self) -> None:
        self._parts: dict[str, MetricState] = {}

    def add(self, name: str, value: SupportsFloat, count: SupportsFloat = 1.0, rule: Rule | None = None) -> None:
        """Add one value: a number or a one-element tensor. `count` is its weight in a mean (tokens, samples)."""
        number, weight = float(value), float(count)
        if not weight >= 0:
            raise ValueError(f"metric {name}: count={weight}: expected a weight of at least 0")
        known = self._parts.get(name)
        rule = rule or (known.rule if known else rule_of(name))
        if rule == "mean":  # 0 × NaN is NaN: a rank that had no tokens must not spoil the mean of those that had
            number = number * weight if weight else 0.0
        self._fold(name, MetricState(rule, number, weight), within_rank=True)

    def update(self, figures: Mapping[str, SupportsFloat], count: SupportsFloat = 1.0) -> None:
        """Add several values with the same weight, each by the rule of its name."""
        for name, value in figures.items():
            self.add(name, value, count)

    def spread(self, name: str, values: Iterable[SupportsFloat]) -> None:
        """Add `<name>/mean`, `<name>/max` and `<name>/min` of the values; nothing if there are none."""
        numbers = list(map(float, values))
        if not numbers:
            return
        self.add(f"{name}/mean", sum(numbers) / len(numbers), len(numbers))
        self.add(f"{name}/max", max(numbers))
        self.add(f"{name}/min", min(numbers))

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the duration of the block in seconds to `timing_s/<name>`, also if the block raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(f"timing_s/{name}", time.perf_counter() - start)

    def merge(self, other: "Metrics | Mapping[str, MetricState]") -> "Metrics":
        """Merge another rank's metrics into this one. Return self."""
        parts = other._parts if isinstance(other, Metrics) else other
        for name, part in list(parts.items()):
            self._fold(name, MetricState(*part), within_rank=False)
        return self

    def result(self) -> dict[str, float]:
        """Return the merged values, in the order in which their names were first added."""
        figures = {}
        for name, part in self._parts.items():
            if part.rule != "mean":
                figures[name] = part.value
            elif part.weight > 0:
                figures[name] = part.value / part.weight
        return figures

    def take(self) -> dict[str, MetricState]:
        """Return plain picklable data for `merge` in another process, and reset; a worker sends it at the end of a
        stage."""
        parts, self._parts = self._parts, {}
        return parts

    def _fold(self, name: str, part: MetricState, within_rank: bool) -> None:
        known = self._parts.get(name)
        if known is None:
            self._parts[name] = part
            return
        if known.rule != part.rule:
            raise ValueError(f"metric {name}: rule={part.rule}: it is already folded by {known.rule}")
        if part.rule in ("mean", "sum") or (part.rule == "seconds" and within_rank):
            value = known.value + part.value
        elif part.rule == "min":
            value = _extreme(min, known.value, part.value)
        else:
            value = _extreme(max, known.value, part.value)
        self._parts[name] = MetricState(part.rule, value, known.weight + part.weight)


def throughput(tokens: int, seconds: float, cards: int) -> dict[str, float]:
    """Compute the throughput of one step, named and defined as in verl.

    `tokens` counts prompt and response tokens of the step, `seconds` is its wall clock. `perf/throughput` is tokens per
    second *per card*; `perf/tokens_per_s` is that of the whole run."""
    rate = tokens / seconds if seconds > 0 else 0.0
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": float(seconds),
        "perf/tokens_per_s": rate,
        "perf/throughput": rate / max(cards, 1),
    }


def _extreme(choose: Callable[[float, float], Any], left: float, right: float) -> float:
    # Python's max and min drop a NaN depending on the order of their arguments; a broken figure must stay visible.
    if left != left or right != right:
        return float("nan")
    return choose(left, right)
