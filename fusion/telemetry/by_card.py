"""Tabulate how each card spent its time, as text cells. Pure except `read_cards`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fusion.telemetry.columns import seconds
from fusion.telemetry.memory import human_bytes
from fusion.telemetry.timeline import WAITING, CardSummary, summarize_run
from fusion.telemetry.trace import read_timeline

MAX_CARDS = 8
"""Maximum number of cards with a column each."""

EXTREMES = 3
"""With more cards: the number of least busy and of most busy ones that are shown."""

MAX_TIMELINE_BYTES = 1 << 28
"""Maximum size of a timeline.json that is read for the table; reading takes about ten times as much memory."""


def read_cards(timeline: Path) -> tuple[list[CardSummary], list[str]]:
    """Summarise each card's time; the second value holds a line that explains a missing table."""
    if not timeline.exists():
        return [], []
    if (size := timeline.stat().st_size) > MAX_TIMELINE_BYTES:
        limit = human_bytes(MAX_TIMELINE_BYTES)
        return [], [f"  timeline.json has {human_bytes(size)}: the table by card is omitted above {limit}"]
    try:
        return summarize_run(read_timeline(timeline)), []
    except ValueError as error:
        return [], [f"  the table by card is omitted: {error}"]


def card_rows(cards: Sequence[CardSummary]) -> list[list[str]]:
    """List the seconds of each kind of work, largest first, then waiting and idle; they add up to wall time.

    Of more than `MAX_CARDS` cards only the least and the most busy are shown; the share is that of all cards.
    """
    title, shown = "seconds by card", list(cards)
    if len(cards) > MAX_CARDS:
        by_use = sorted(cards, key=lambda card: card.utilisation)
        shown = by_use[:EXTREMES] + by_use[-EXTREMES:]
        title = f"seconds, {len(shown)} of {len(cards)} cards"
    parts, whole = {card.card: by_main_kind(card) for card in cards}, sum(card.wall_ns for card in cards) or 1
    total = sum((Counter(part) for part in parts.values()), Counter[str]())
    kinds = sorted(total, key=lambda kind: (kind == "idle", kind.startswith(WAITING), -total[kind]))
    rows = [[title, *(card.card for card in shown), "share"]]
    for kind in kinds:
        figures = [seconds(parts[card.card].get(kind, 0) / 1e9) for card in shown]
        rows.append([kind, *figures, f"{total[kind] / whole:.1%}"])
    rows.append(["wall", *(seconds(card.wall_ns / 1e9) for card in shown), ""])
    rows.append(
        ["busy", *(f"{card.utilisation:.0%}" for card in shown), f"{sum(c.busy_ns for c in cards) / whole:.1%}"]
    )
    return rows


def by_main_kind(card: CardSummary) -> dict[str, int]:
    """Sum nanoseconds by kind, including `idle`; kinds such as `switch/kv` count as `switch`."""
    kinds_ns = {"idle": card.idle_ns}
    for kind, length_ns in card.by_kind_ns.items():
        main = kind.partition("/")[0]
        kinds_ns[main] = kinds_ns.get(main, 0) + length_ns
    return kinds_ns
