"""Measures how busy the cards of a run were, step by step, from spans that arrive when a stage has ended.

    step k      │ switch │ generate …                     │ train │ counted: up to here, if no stage is under way,
    step k + 1  │ switch │ generate ───── suspended ───── … ──────►   else up to where the oldest of these began

Invariants:
1. What is counted begins where the count before ended: over a run every instant is counted once.
2. The seconds of a count add up to its wall clock, over the mean of all cards.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusion.telemetry.timeline import WAITING, Span, summarize


class Usage:
    """Accumulates the usage of these cards from ``start_ns`` on (`wall_ns`)."""

    def __init__(self, cards: Iterable[str], start_ns: int):
        self._cards, self._start_ns = list(cards), start_ns
        self._spans: list[Span] = []

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans of stages that have ended; those that ended before the last count are ignored."""
        self._spans += (span for span in spans if span.end_ns > self._start_ns)

    def count(self, end_ns: int) -> dict[str, float]:
        """Compute figures of the time since the last count; empty if no time has passed. All stages that began before
        ``end_ns`` must have been added.

        perf/utilisation: busy share, 0 to 1, mean over cards; timing_s/card/<kind>: seconds of each kind of work of the
        mean card, a switch as a whole, and `idle`: everything else, as it is known only later what a card waited for.
        """
        if end_ns <= self._start_ns:
            return {}
        summaries = summarize(self._spans, self._start_ns, end_ns, self._cards)
        self._start_ns, self._spans = end_ns, [span for span in self._spans if span.end_ns > end_ns]
        seconds: dict[str, float] = {}
        for card in summaries:
            for kind, part_ns in (*card.by_kind_ns.items(), ("idle", card.idle_ns)):
                name = "idle" if kind.startswith(WAITING) else kind.partition("/")[0]
                seconds[name] = seconds.get(name, 0.0) + part_ns / 1e9 / len(summaries)
        busy = sum(card.utilisation for card in summaries) / len(summaries)
        return {"perf/utilisation": busy} | {f"timing_s/card/{kind}": seconds[kind] for kind in sorted(seconds)}
