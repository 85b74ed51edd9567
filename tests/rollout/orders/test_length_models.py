"""The default order on ten models of lengths over epochs: never much slower than in order of arrival, on a clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from fusion.rollout.entry import Entry
from fusion.rollout.length_history import LengthHistory
from fusion.rollout.orders import find_order
from fusion.rollout.orders.interface import Lengths, OrderInputs

ROWS, STEPS_PER_EPOCH, EPOCHS, GROUP, SLOTS, MAX_TOKENS = 64, 4, 4, 8, 48, 4096

Draw = np.random.Generator
Model = Callable[[int, np.ndarray, Draw], np.ndarray]
"""(epoch, rank of each row from 0 to 1 in random order, generator) → median length of each row"""


def lognormal(ranks: np.ndarray, spread: float) -> np.ndarray:
    return 256 * np.exp(spread * (ranks - 0.5) * 3.5)


MODELS: dict[str, tuple[Model, float]] = {
    "rhyming": (lambda epoch, ranks, draw: lognormal(ranks, 0.9), 0.25),
    "growing": (lambda epoch, ranks, draw: lognormal(ranks, 0.7) * 1.4**epoch, 0.25),
    "shrinking": (lambda epoch, ranks, draw: lognormal(ranks, 0.9) * 0.7**epoch, 0.25),
    "equal": (lambda epoch, ranks, draw: lognormal(0.5 + 0 * ranks, 0.9), 0.05),
    "noise within groups": (lambda epoch, ranks, draw: lognormal(0.5 + 0 * ranks, 0.9), 0.9),
    "drawn anew": (lambda epoch, ranks, draw: lognormal(draw.permutation(ranks), 0.9), 0.25),
    "reversed": (lambda epoch, ranks, draw: lognormal(ranks if epoch % 2 == 0 else 1 - ranks, 0.9), 0.25),
    "reversed once": (lambda epoch, ranks, draw: lognormal(ranks if epoch < 1 else 1 - ranks, 0.9), 0.25),
    "bimodal, half swapped": (
        lambda epoch, ranks, draw: np.where((ranks < 0.5) ^ (draw.random(ROWS) < 0.25), 64.0, 1500.0),
        0.25,
    ),
    "heavy tail": (lambda epoch, ranks, draw: 128 / (1.02 - ranks) ** 0.8, 0.4),
}
"""Model, and the deviation of logarithms within a group"""


def steps_of(model: str, seed: int) -> Iterator[list[tuple[str, list[int]]]]:
    """Yield the groups of each step: row, and the lengths of its responses."""
    draw = np.random.default_rng(seed)
    (median_of, spread), ranks = MODELS[model], draw.permutation(np.linspace(0, 1, ROWS))
    for epoch in range(EPOCHS):
        medians = median_of(epoch, ranks, draw)
        for rows in np.split(draw.permutation(ROWS), STEPS_PER_EPOCH):
            lengths = np.exp(draw.normal(0, spread, (len(rows), GROUP))) * medians[rows, None]
            yield [
                (f"r{row}", np.clip(drawn, 1, MAX_TOKENS).astype(int).tolist())
                for row, drawn in zip(rows, lengths, strict=True)
            ]


def seconds_of(name: str, model: str, seed: int, chunk: int) -> float:
    """Return the time of all steps, in tokens of a slot: each has one request at a time, for a chunk."""
    history, total = LengthHistory(), 0.0
    for step, groups in enumerate(steps_of(model, seed)):
        order, left, slots, now, serial = find_order(name)(OrderInputs(history)), {}, list[tuple]([]), 0.0, 0
        for number, (row, lengths) in enumerate(groups):
            order.add_group(row, Lengths(MAX_TOKENS, history.of(row), step=step))
            entries = [
                Entry(f"{row}/{k}", row, 1, MAX_TOKENS, position=number * GROUP + k, member=k) for k in range(GROUP)
            ]
            left |= {entry.id: length for entry, length in zip(entries, lengths, strict=True)}
            order.add(entries)
        waiting = [] if chunk else order.take_all(ranked=True)[::-1]
        while slots or len(order) or waiting:
            while len(slots) < SLOTS and (len(order) or waiting):
                entry = order.take() if chunk else waiting.pop()
                taken = min(chunk or MAX_TOKENS, left[entry.id])
                serial += 1
                heapq.heappush(slots, (now + taken, serial, taken, entry))
            now, _, taken, entry = heapq.heappop(slots)
            entry.generated += taken
            left[entry.id] -= taken
            if left[entry.id]:
                order.add([entry])
            else:
                order.observe_finished(entry.group, entry.generated)
        total += now
        for number, (row, lengths) in enumerate(groups):
            history.observe(number, row, lengths)
        history.end_step()
    return total


@pytest.mark.parametrize("chunk", [0, 64])
@pytest.mark.parametrize("model", MODELS)
def test_the_default_order_is_nowhere_slower_than_in_order_of_arrival(model, chunk):
    ratios = [seconds_of("fifo", model, seed, chunk) / seconds_of("history", model, seed, chunk) for seed in range(4)]
    assert np.mean(ratios) >= 0.97, ratios


def test_where_the_last_epoch_foretells_lengths_it_is_used():
    """Else the order could be safe by never relying on it."""
    ratios = [seconds_of("fifo", "rhyming", seed, 0) / seconds_of("history", "rhyming", seed, 0) for seed in range(4)]
    assert np.mean(ratios) >= 1.05, ratios
