"""Measure how busy the cards of a run were, step by step, from spans that arrive when a stage has ended.

    step k      │ switch │ generate …                     │ train │ counted: up to here, if no stage is under way,
    step k + 1  │ switch │ generate ───── suspended ───── … ──────►   else up to where the oldest of these began

Invariants:
1. What is counted begins where the count before ended: over a run every instant is counted once, but for those that are
   excluded, such as an evaluation between two steps: these are counted never.
2. The seconds of a count add up to its wall clock, without what is excluded, over the mean of all cards."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from fusion.telemetry.timeline import WAITING, Span, summarize

TRAINING, GENERATION = ("train", "optimizer"), ("prefill", "decode")
"""Kinds of work whose overlap is measured"""


class Usage:
    """Accumulate the usage of these cards from ``start_ns`` on (`wall_ns`)."""

    def __init__(self, cards: Iterable[str], start_ns: int):
        self._cards, self._start_ns = list(cards), start_ns
        self._spans: list[Span] = []
        self._excluded: list[tuple[int, int]] = []
        """Starts and ends of what the next counts leave out, in order, without an overlap"""

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans of stages that have ended; those that ended before the last count are ignored."""
        self._spans += (span for span in spans if span.end_ns > self._start_ns)

    def exclude(self, start_ns: int, end_ns: int) -> None:
        """Leave the time from ``start_ns`` to ``end_ns`` out of what is counted; it begins after those excluded
        before."""
        self._excluded.append((start_ns, end_ns))

    def count(self, end_ns: int) -> dict[str, float]:
        """Compute figures of the time since the last count; empty if no time is left. All stages that began before
        ``end_ns`` must have been added.

        perf/utilisation: busy share, 0 to 1, mean over cards; timing_s/card/<kind>: seconds of each kind of work of the
        mean card, a switch as a whole, and `idle`: everything else, as it is known only later what a card waited for.
        Where cards train and generate, perf/overlap: share, 0 to 1, of the shorter of both that ran beside the other;
        timing_s/step_floor: seconds of the longer, which what is counted takes at least."""
        if end_ns <= self._start_ns:
            return {}
        periods = self._take_periods(end_ns)
        cards = [card for start, end in periods for card in summarize(self._spans, start, end, self._cards)]
        overlap = _overlap(self._spans, periods)
        self._spans = [span for span in self._spans if span.end_ns > end_ns]
        if not periods:
            return {}
        num_cards = len(cards) // len(periods)
        seconds = defaultdict[str, float](float)
        for card in cards:
            for kind, part_ns in (*card.by_kind_ns.items(), ("idle", card.idle_ns)):
                seconds["idle" if kind.startswith(WAITING) else kind.partition("/")[0]] += part_ns / 1e9 / num_cards
        busy = sum(card.busy_ns for card in cards) / sum(card.wall_ns for card in cards)
        by_kind = {f"timing_s/card/{kind}": seconds[kind] for kind in sorted(seconds)}
        return {"perf/utilisation": busy} | overlap | by_kind

    def _take_periods(self, end_ns: int) -> list[tuple[int, int]]:
        """Return the time since the last count in parts, without what is excluded; the next count begins at
        ``end_ns``."""
        periods, start = [], self._start_ns
        for begin, end in [*self._excluded, (end_ns, end_ns)]:
            if start < min(begin, end_ns):
                periods.append((start, min(begin, end_ns)))
            start = max(start, end)
        self._start_ns, self._excluded = end_ns, [gap for gap in self._excluded if gap[1] > end_ns]
        return periods


def _overlap(spans: Sequence[Span], periods: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the figures of training beside generation; {} without either."""
    train, generate = ([span for span in spans if span.kind in kinds] for kinds in (TRAINING, GENERATION))
    train_ns, generate_ns, any_ns = (
        sum(_covered_ns(one, *period) for period in periods) for one in (train, generate, [*train, *generate])
    )
    if not train_ns or not generate_ns:
        return {}
    both_ns = train_ns + generate_ns - any_ns
    return {
        "perf/overlap": both_ns / min(train_ns, generate_ns),
        "timing_s/step_floor": max(train_ns, generate_ns) / 1e9,
    }


def _covered_ns(spans: Iterable[Span], start_ns: int, end_ns: int) -> int:
    """Return the nanoseconds of a period in which there is any of the spans."""
    covered, until = 0, start_ns
    for begin, end in sorted((span.start_ns, span.end_ns) for span in spans):
        covered += max(0, min(end, end_ns) - max(begin, until))
        until = max(until, min(end, end_ns))
    return covered
