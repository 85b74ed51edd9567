"""Draw a typical step of a run: what its cards did, averaged over those of one role, in bounded size. Pure.

A step goes from one update of the weights to the next; the typical one is the median by duration. A lane is all cards
that do the same: train, generate, or both. What is neither work nor a part of a switch is a bubble: waiting and idle.

Invariants:
1. The pieces of a lane add up to the step's duration, to a microsecond each, and the shares of a piece add up to 1.
2. `bubble` is the bubbles' share of the time of all cards in the step.
3. There are at most `PIECES` pieces of a lane."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusion.telemetry.page.card_time import IDLE
from fusion.telemetry.timeline import MAIN, WAITING, Span, innermost, natural

PIECES = 300
UPDATE = "optimizer"
ROLES = {(True, True): "train and generate", (True, False): "train", (False, True): "generate"}
"""Name of cards by whether they train, and whether they generate"""
Interval = tuple[str, int, int]
"""Kind, and nanoseconds from the beginning of the step to its beginning and its end"""


def typical_step(spans: Iterable[Span], updates: int = 1) -> dict[str, Any] | None:
    """Return `us`, `bubble` and `lanes` of the typical step; None where there are no two updates.
    ``updates``: of the weights in a step."""
    by_card: dict[str, list[Span]] = {}
    for span in spans:
        if span.lane == MAIN:
            by_card.setdefault(span.card, []).append(span)
    ends = _ends(by_card, updates)
    if len(ends) < 2:
        return None
    steps = sorted(zip(ends, ends[1:], strict=False), key=lambda step: step[1] - step[0])
    begin, end = steps[(len(steps) - 1) // 2]
    by_role: dict[str, list[list[Interval]]] = {}
    for card in sorted(by_card, key=natural):
        kinds = {span.kind for span in by_card[card]}
        role = ROLES.get((UPDATE in kinds, bool(kinds & {"prefill", "decode"})), "others")
        inner = innermost(by_card[card], begin, end)
        by_role.setdefault(role, []).append(
            [((kind or IDLE).partition("/")[0], start - begin, stop - begin) for kind, start, stop in inner]
        )
    intervals = [one for cards in by_role.values() for card in cards for one in card]
    bubble_ns = sum(stop - start for kind, start, stop in intervals if is_bubble(kind))
    lanes = [_lane(role, cards, end - begin) for role, cards in by_role.items()]
    return {"us": (end - begin) // 1000, "bubble": bubble_ns / (end - begin) / len(by_card), "lanes": lanes}


def is_bubble(kind: str) -> bool:
    """Return whether a card with this kind of time neither works nor switches."""
    return kind == IDLE or kind.startswith(WAITING)


def aligned(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the typical steps of several runs as lanes on one axis of time, in the form of `card_time`; None: no run
    has one."""
    typical = [(run["name"], run["typical"]) for run in runs if run.get("typical")]
    if not typical:
        return None
    kinds = {kind for _, step in typical for lane in step["lanes"] for parts in lane["parts"] for kind, _ in parts}
    ordered = sorted(kinds, key=_depth)
    number = {kind: index for index, kind in enumerate(ordered)}
    strips = []
    for name, step in typical:
        for lane in step["lanes"]:
            parts = [[[number[kind], share] for kind, share in part] for part in lane["parts"]]
            of = f"{name}: " if len(runs) > 1 else ""
            strips.append({"card": f"{of}{lane['cards']} {lane['role']}", "us": lane["us"], "parts": parts})
    wall_us = max(step["us"] for _, step in typical)
    plain = {"starts_us": [], "blur_us": 0, "num_cards": len(strips)}
    return (
        {"wall_us": wall_us, "kinds": [{"kind": kind} for kind in ordered], "strip_kinds": ordered}
        | plain
        | {"strips": strips}
    )


def _ends(by_card: Mapping[str, Sequence[Span]], updates: int) -> list[int]:
    """Return when all cards that train have ended each step."""
    ends_by_card = [sorted(span.end_ns for span in spans if span.kind == UPDATE) for spans in by_card.values()]
    return [max(ends) for ends in zip(*filter(None, ends_by_card), strict=False)][updates - 1 :: updates]


def _lane(role: str, cards: Sequence[Sequence[Interval]], length_ns: int) -> dict[str, Any]:
    """Return the pieces of a lane: microseconds of each, and its kinds with their shares; equal neighbours are one."""
    edges = [length_ns * piece // PIECES for piece in range(PIECES + 1)]
    by_piece: list[dict[str, int]] = [{} for _ in range(PIECES)]
    for kind, start, stop in (one for card in cards for one in card):
        piece = min(PIECES - 1, max(0, start * PIECES // length_ns))
        while start < stop:
            while edges[piece + 1] <= start:
                piece += 1
            until = min(stop, edges[piece + 1])
            by_piece[piece][kind] = by_piece[piece].get(kind, 0) + until - start
            start = until
    ends: list[int] = []
    parts: list[list[list[Any]]] = []
    for end, ns in zip(edges[1:], by_piece, strict=True):
        whole = sum(ns.values())
        shares = [[kind, round(ns[kind] / whole, 4)] for kind in sorted(ns, key=_depth)]
        if shares and parts[-1:] != [shares]:
            ends.append(end // 1000)
            parts.append(shares)
        elif ends:
            ends[-1] = end // 1000
    us = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return {"role": role, "cards": len(cards), "us": us, "parts": parts}


def _depth(kind: str) -> tuple[bool, bool, str]:
    """Return a key that sorts work before waiting, and waiting before idle."""
    return kind == IDLE, kind.startswith(WAITING), kind
