"""Measure what a token costs by the length of its sample, and assert that it costs no more in the longest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks.harness import progress

LENGTHS, ROUNDS = (1024, 16_384, 131_072), 3
"""ROUNDS: of which the least counts"""
MAX_GROWTH = 0.5


def assert_long_samples_cost_no_more(costs_of: Callable[[int], Iterable[tuple[str, float]]]) -> None:
    """Compare the CPU a token of samples of the longest length with that of the next; ``costs_of``: length of a sample
    → costs by name, those that are compared end in `us_a_token`."""
    costs = {}
    for num_tokens in LENGTHS:
        costs[num_tokens] = dict(costs_of(num_tokens))
        progress(f"{num_tokens:,} tokens", costs[num_tokens])
    *_, before, last = costs.values()
    grown = {name: last[name] / before[name] - 1 for name in last if name.endswith("us_a_token")}
    assert grown and max(grown.values()) <= MAX_GROWTH, grown
