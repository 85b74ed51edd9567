"""Plans that move the right bytes to the right places, but not within the bound of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fusion.ep_switch import Layout, Plan
from fusion.ep_switch.moves import Move, Moves, Round, UnitId


def frees_nothing(plan: Plan) -> Plan:
    """The source stays where it is until the end, as if the target had its own memory."""
    return replace(plan, unread=(), rounds=tuple(replace(round_, release_after=()) for round_ in plan.rounds))


def in_layer_order(plan: Plan) -> Plan:
    """Layer by layer as the model runs: takes memory for a layer of the target, fills it, then frees the source's."""
    room = plan.bucket_bytes // 2 // max(plan.source.dtype.itemsize, plan.target.dtype.itemsize)
    layers: dict[float, list[Move]] = defaultdict(list)
    for move in (move for round_ in plan.rounds for move in round_.moves):
        layers[_layer(plan.target, (move.target_rank, move.target.unit))].append(move)
    released = {*plan.unread, *(unit for round_ in plan.rounds for unit in round_.release_after)}
    rounds: list[Round] = []
    for layer in sorted(layers):
        chunks = list(_chunks(layers[layer], room))
        taken = {(move.target_rank, move.target.unit) for move in layers[layer]}
        freed = {unit for unit in released if _layer(plan.source, unit) == layer}
        for i, moves in enumerate(chunks):
            ends = (taken if i == 0 else (), freed if i == len(chunks) - 1 else ())
            rounds.append(Round(Moves.of(moves), True, *(tuple(sorted(units)) for units in ends)))
    return replace(plan, unread=(), rounds=tuple(rounds))


def _layer(layout: Layout, unit: UnitId) -> float:
    words = layout.units(unit[0])[unit[1]].entries[0][0].name.split(".")
    return float(words[1]) if words[0] == "layers" else -1.0 if words[0] == "embed" else float("inf")


def _chunks(moves: Iterable[Move], room: int) -> Iterator[tuple[Move, ...]]:
    """Runs of moves in which no rank sends or writes more than ``room`` elements."""
    chunk: list[Move] = []
    used: dict[tuple[str, int], int] = defaultdict(int)
    for move in moves:
        costs = {("write", move.target_rank): move.numel} | (
            {} if move.local else {("send", move.source_rank): move.numel}
        )
        if chunk and any(used[key] + size > room for key, size in costs.items()):
            yield tuple(chunk)
            chunk, used = [], defaultdict(int)
        chunk.append(move)
        for key, size in costs.items():
            used[key] += size
    yield tuple(chunk)
