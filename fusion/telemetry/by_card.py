"""The table of where the time of each card went, as text cells. Pure but for `read_cards`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fusion.telemetry.columns import seconds
from fusion.telemetry.memory import human_bytes
from fusion.telemetry.timeline import WAITING, CardSummary, summarize_run
from fusion.telemetry.trace import read_timeline

MOST_CARDS = 8
"""Columns of the table by card …"""

EXTREMES = 3
"""… or, where there are more, so many of the least and of the most busy"""

LARGEST_TIMELINE = 1 << 28
"""Bytes of a timeline.json that is still read for that table; reading takes about ten times as much memory."""


def read_cards(timeline: Path) -> tuple[list[CardSummary], list[str]]:
    """Where the time of each card went, or a line why that is not told."""
    if not timeline.exists():
        return [], []
    if (size := timeline.stat().st_size) > LARGEST_TIMELINE:
        limit = human_bytes(LARGEST_TIMELINE)
        return [], [f"  timeline.json has {human_bytes(size)}: no table by card is made of more than {limit}"]
    return summarize_run(read_timeline(timeline)), []


def card_rows(cards: Sequence[CardSummary]) -> list[list[str]]:
    """A line for each kind of work, the most first, then for waiting and idle; they add up to the wall clock. Of many
    cards those that were the least and the most busy are shown; the share is that of all."""
    title, shown = "seconds by card", list(cards)
    if len(cards) > MOST_CARDS:
        by_use = sorted(cards, key=lambda card: card.utilisation)
        shown = by_use[:EXTREMES] + by_use[-EXTREMES:]
        title = f"seconds, {len(shown)} of {len(cards)} cards"
    parts, whole = {card.card: _by_main_kind(card) for card in cards}, sum(card.wall_ns for card in cards) or 1
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


def _by_main_kind(card: CardSummary) -> dict[str, int]:
    """Nanoseconds by kind and of `idle`; kinds such as `switch/kv` are part of `switch`."""
    found = {"idle": card.idle_ns}
    for kind, length in card.by_kind_ns.items():
        main = kind.partition("/")[0]
        found[main] = found.get(main, 0) + length
    return found
