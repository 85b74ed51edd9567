"""Tabulate and draw where every card's time went, in bounded size. Pure.

A strip is a card's time as runs of one kind each. `StageStrip` merges them if they are too many, so the seconds of each
kind stay exact and a run is shifted by at most `blur_us`. The starts of a run that was resumed follow each other: the
time in between is left out.

Invariants:
1. The runs of each card add up to the duration of all starts, and those of one kind other than idle to its time in the
   table, each to a microsecond per run.
2. There are at most ``max_runs`` runs over all cards, or `MIN_RUNS` of each card if that is more."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fusion.telemetry.stage_strip import StageStrip
from fusion.telemetry.timeline import WAITING, CardSummary, Span, innermost, natural, starts_of

MAX_RUNS = 64_000
"""Maximum number of runs of all strips: about 600 KB of the page."""
MIN_RUNS, MAX_CARD_RUNS = 500, 8000
"""Bounds of the number of runs of one card."""
MAX_CARDS = 64
"""Maximum number of cards that are drawn; of more, half are the least busy and half the most busy ones"""
IDLE = "idle"


ABSENT = None
"""Kind of the time of a start in which a card has no span: drawn as idle, and not counted in the table."""
_Intervals = dict[str, list[tuple[str | None, int]]]
"""What each card did one after the other: kind and nanoseconds."""


def card_time(spans: Iterable[Span], max_runs: int = MAX_RUNS) -> dict[str, Any] | None:
    """Return `kinds` (of the table, largest first, then waiting and idle), `table` (a row per card), `strips`, and
    `starts_us`, at which later starts of a resumed run begin; None if there are no spans."""
    starts = starts_of(spans)
    if not starts:
        return None
    intervals, ends = _intervals(starts)
    summaries = []
    for name in sorted(intervals, key=natural):
        present = ((None if kind == IDLE else kind, ns) for kind, ns in intervals[name] if kind is not ABSENT)
        summaries.append(CardSummary.of(name, present))
    cards = _shown(summaries)
    per_card = max(MIN_RUNS, min(MAX_CARD_RUNS, max_runs // len(cards)))
    strips = {card.card: _strip(intervals[card.card], per_card) for card in cards}
    kinds: dict[str, int] = {}
    return {
        "num_cards": len(summaries),
        "wall_us": ends[-1] // 1000,
        "starts_us": [end // 1000 for end in ends[:-1]],
        "blur_us": max(strip.blur_ns for strip in strips.values()) // 1000,
        "kinds": _kinds(summaries),
        "table": [_row(card) for card in cards],
        "strips": [{"card": card.card, **_encoded(strips[card.card], kinds)} for card in cards],
        "strip_kinds": list(kinds),
    }


def _intervals(starts: Sequence[Sequence[Span]]) -> tuple[_Intervals, list[int]]:
    """Return what every card did in all starts, and the nanoseconds at which each start ends."""
    intervals: _Intervals = {span.card: [] for start in starts for span in start}
    ends: list[int] = []
    for start in starts:
        begin, end = start[0].start_ns, max(span.end_ns for span in start)
        by_card: dict[str, list[Span]] = {card: [] for card in intervals}
        for span in start:
            by_card[span.card].append(span)
        for card, own in by_card.items():
            if own:
                intervals[card] += [(kind or IDLE, stop - now) for kind, now, stop in innermost(own, begin, end)]
            else:
                intervals[card].append((ABSENT, end - begin))
        ends.append((ends[-1] if ends else 0) + end - begin)
    return intervals, ends


def _strip(intervals: Iterable[tuple[str | None, int]], max_runs: int) -> StageStrip:
    strip, now = StageStrip(0, max_runs), 0
    for kind, length_ns in intervals:
        now += length_ns
        strip.mark(kind or IDLE, now)
    return strip


def _encoded(strip: StageStrip, kinds: dict[str, int]) -> dict[str, list[int]]:
    """Return the kind of each run, as an index of ``kinds``, which is completed, and its microseconds."""
    runs = strip.runs()
    numbers = [kinds.setdefault(run.kind, len(kinds)) for run in runs]
    ends = [round(run.end_ns / 1000) for run in runs]
    return {"kind": numbers, "us": [end - begin for begin, end in zip([0, *ends], ends, strict=False)]}


def _by_main_kind(card: CardSummary) -> Counter[str]:
    """Sum nanoseconds by kind, including `idle`; kinds such as `switch/kv` count as `switch`."""
    kinds_ns = Counter({IDLE: card.idle_ns})
    for kind, length_ns in card.by_kind_ns.items():
        kinds_ns[kind.partition("/")[0]] += length_ns
    return kinds_ns


def _row(card: CardSummary) -> dict[str, Any]:
    seconds = {kind: ns / 1e9 for kind, ns in _by_main_kind(card).items()}
    return {"card": card.card, "wall_s": card.wall_ns / 1e9, "busy": card.utilisation, "seconds": seconds}


def _kinds(cards: Sequence[CardSummary]) -> list[dict[str, Any]]:
    total = Counter[str]()
    for card in cards:
        total.update(_by_main_kind(card))
    whole = sum(card.wall_ns for card in cards) or 1
    ordered = sorted(total, key=lambda kind: (kind == IDLE, kind.startswith(WAITING), -total[kind], kind))
    return [{"kind": kind, "share": total[kind] / whole} for kind in ordered]


def _shown(cards: Sequence[CardSummary]) -> list[CardSummary]:
    if len(cards) <= MAX_CARDS:
        return list(cards)
    by_use = sorted(cards, key=lambda card: card.utilisation)
    half = MAX_CARDS // 2
    return sorted(by_use[:half] + by_use[-half:], key=lambda card: natural(card.card))
