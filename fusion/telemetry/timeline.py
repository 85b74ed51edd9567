"""Record the activities of every card on one clock.

    worker, card 0:  timeline = Timeline("card 0")
                     with timeline.span("generate", kind="gen"):
                         with timeline.strip() as mark: ...        each step: mark("decode"), inside the stage
                     spans = timeline.drain()                      plain tuples, travel to the controller
    controller:      file.append(spans)                            timeline.json, opens in Perfetto
                     summarize(spans)                              per card: time of each kind + idle = wall

One clock: the machine's monotonic clock, mapped once per process to wall time, so that spans of several processes and
nodes are on one axis and setting the wall clock does not move them. Times are integers (nanoseconds), so that parts
add up exactly.

Invariants of `summarize`:
1. For every card the nanoseconds of all kinds plus idle equal the wall clock between the same start and end.
2. An instant is counted once: of overlapping spans, for the one that started last (the innermost if they are nested).
3. The result does not depend on the order of the spans, nor on how they were divided over processes."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusion.telemetry.stage_strip import StageStrip

_WALL_MINUS_MONOTONIC_NS = time.time_ns() - time.monotonic_ns()

WAITING = "wait"
"""Prefix of the kinds of waiting: shown by name, not counted as busy."""
WAIT_DATA = "wait_data"
"""Waiting for samples to be generated, scored or read, or, in an engine, for requests."""
PREPARE = "prepare"
"""Preparation of a card, once when the run starts or resumes."""
WAIT_WEIGHTS = "wait_weights"
"""Waiting for weights to be trained, or for other cards to be ready to exchange them."""
MAIN = "main"
"""The lane of a card's time."""


def wall_ns() -> int:
    """Return nanoseconds since the epoch, by a monotonic clock."""
    return time.monotonic_ns() + _WALL_MINUS_MONOTONIC_NS


class Span(NamedTuple):
    """One activity of one card. Concurrent work in another thread is on a separate `lane`: shown, but not part of the
    card's time."""

    card: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    lane: str = MAIN


class Timeline:
    """Record the spans of one card in one process; safe from several threads. `clock_ns` may be a virtual clock.

    `max_spans`: number of the last spans that are kept until `drain`; 0 if it is never drained; None: all."""

    def __init__(self, card: str, clock_ns: Callable[[], int] = wall_ns, max_spans: int | None = None) -> None:
        self.card, self.clock_ns = card, clock_ns
        self.annotate: Callable[[str], AbstractContextManager[Any]] | None = None
        """Function that marks the block of a `span` by its name in another record, such as a profiler's"""
        self.after_mark: Callable[[], None] | None = None
        """Function that is called after every mark of a `strip`, on its thread"""
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._strip: StageStrip | None = None
        self._strip_lane = MAIN

    @contextmanager
    def span(self, name: str, kind: str = "", lane: str = MAIN) -> Iterator[None]:
        """Record the block as a span, also if it raises. `kind` defaults to the name."""
        with nullcontext() if self.annotate is None else self.annotate(name):
            start_ns = self.clock_ns()
            try:
                yield
            finally:
                self.add(name, start_ns, self.clock_ns(), kind=kind, lane=lane)

    def add(self, name: str, start_ns: int, end_ns: int, kind: str = "", lane: str = MAIN) -> None:
        """Record a span whose times are known."""
        if end_ns < start_ns:
            raise ValueError(f"span {name}: end_ns={end_ns} is before start_ns={start_ns}")
        self._spans.append(
            Span(card=self.card, name=name, kind=kind or name, start_ns=start_ns, end_ns=end_ns, lane=lane)
        )

    @contextmanager
    def strip(self, lane: str = MAIN) -> Iterator[Callable[[str], None]]:
        """Yield ``mark(kind)``, which records the time since the last mark as this kind. The block becomes a bounded
        number of spans whose seconds by kind are exact (`StageStrip`), also if it raises; the time after the last mark
        is not recorded. Called from one thread."""
        assert self._strip is None, "a strip is open already"
        self._strip, self._strip_lane = StageStrip(self.clock_ns()), lane
        try:
            yield self.mark
        finally:
            self.cut()
            self._strip = None

    def mark(self, kind: str) -> None:
        """Mark the open `strip`, if there is one. Called from its thread."""
        if self._strip is not None:
            self._strip.mark(kind, self.clock_ns())
            if self.after_mark is not None:
                self.after_mark()

    def cut(self) -> None:
        """Record the open `strip` up to its last mark, as if the block ended there and another began. Called from its
        thread."""
        runs = [] if self._strip is None else self._strip.runs()
        for kind, start_ns, end_ns in runs:
            self.add(kind.rpartition("/")[2], start_ns, end_ns, kind=kind, lane=self._strip_lane)
        if runs:
            self._strip = StageStrip(runs[-1].end_ns)

    def drain(self) -> list[Span]:
        """Return the spans recorded since the last call."""
        # One pop at a time: the span of a thread that records meanwhile is returned by this call or by the next one.
        return [self._spans.popleft() for _ in range(len(self._spans))]


@dataclass(frozen=True)
class CardSummary:
    """One card's wall-clock time by kind: `sum(by_kind_ns.values()) + idle_ns == wall_ns`. Kinds are in order."""

    card: str
    wall_ns: int
    by_kind_ns: dict[str, int]
    idle_ns: int

    @classmethod
    def of(cls, card: str, intervals: Iterable[tuple[str | None, int]]) -> "CardSummary":
        """Sum intervals (kind, None for idle; nanoseconds)."""
        sums: dict[str | None, int] = {None: 0}
        for kind, length_ns in intervals:
            sums[kind] = sums.get(kind, 0) + length_ns
        wall_ns, idle_ns = sum(sums.values()), sums.pop(None)
        by_kind = {kind: sums[kind] for kind in sorted(filter(None, sums))}
        return cls(card=card, wall_ns=wall_ns, by_kind_ns=by_kind, idle_ns=idle_ns)

    @property
    def busy_ns(self) -> int:
        """Nanoseconds of all kinds except waiting."""
        return sum(ns for kind, ns in self.by_kind_ns.items() if not kind.startswith(WAITING))

    @property
    def utilisation(self) -> float:
        """Busy share of the wall clock, 0 to 1."""
        return self.busy_ns / self.wall_ns if self.wall_ns else 0.0


def summarize(
    spans: Iterable[Span], start_ns: int | None = None, end_ns: int | None = None, cards: Iterable[str] = ()
) -> list[CardSummary]:
    """Summarize the time of each card between start and end (by default the first start and the last end).
    ``cards``: cards to list even if they recorded nothing; these were idle."""
    spans = [Span(*span) for span in spans]
    if not spans and (start_ns is None or end_ns is None):
        return []
    start = min(span.start_ns for span in spans) if start_ns is None else start_ns
    end = max(span.end_ns for span in spans) if end_ns is None else end_ns
    by_card: dict[str, list[Span]] = {card: [] for card in cards}
    for span in spans:
        by_card.setdefault(span.card, []).append(span)
    end = max(start, end)
    return [
        CardSummary.of(card, ((kind, stop - begin) for kind, begin, stop in innermost(by_card[card], start, end)))
        for card in sorted(by_card, key=natural)
    ]


def starts_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Split the spans of a run by its starts: the first one and every resumption. Each start counts from its first
    `prepare`, which begins while no other span is open, to the last span before the next start."""
    starts: list[list[Span]] = []
    end = 0
    for span in sorted((Span(*span) for span in spans), key=lambda span: span.start_ns):
        if not starts or (span.kind == PREPARE and span.start_ns >= end):
            starts.append([])
        starts[-1].append(span)
        end = max(end, span.end_ns)
    return starts


def innermost(spans: Iterable[Span], start: int, end: int) -> Iterator[tuple[str | None, int, int]]:
    """Yield (kind, start_ns, end_ns) from start to end without a gap, of the spans of one card: the kind of the one
    that started last, None where there is none. Neighbours may have the same kind."""
    ordered = sorted(
        (max(span.start_ns, start), -span.start_ns, span.end_ns, span.kind)
        for span in spans
        if span.lane == MAIN and span.end_ns > start and span.start_ns < end
    )
    instants = sorted({start, end, *(begin for begin, *_ in ordered), *(min(stop, end) for _, _, stop, _ in ordered)})
    active: list[tuple[int, int, str]] = []  # heap: latest start first, of those the shortest
    upcoming = 0
    for now, then in zip(instants, instants[1:], strict=False):
        while upcoming < len(ordered) and ordered[upcoming][0] <= now:
            heapq.heappush(active, ordered[upcoming][1:])
            upcoming += 1
        while active and active[0][1] <= now:
            heapq.heappop(active)
        yield (active[0][2] if active else None), now, then


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts `card 2` before `card 10`."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split()]
