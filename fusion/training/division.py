"""Divide the samples of a step over minibatches and data-parallel ranks. Pure: a simulation divides them alike.

Invariants of `split_over_ranks`: every sequence is on exactly one rank; two ranks differ by at most the longest
sequence; a rank has no sequence only if there are fewer sequences than ranks; indices stay in order inside a rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def split_over_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices of the sequences of each rank, balanced by tokens (invariants above). Longest first, each to
    the least loaded rank."""
    if ranks == 1:
        return [list(range(len(lengths)))]
    # A rank's tokens, its number of sequences and its number, most significant first in one integer: a tuple of them
    # would take several times as long to create and to compare.
    one_sequence = ranks
    one_token = one_sequence * (len(lengths) + 1)
    heap = list(range(ranks))
    split: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):  # stable: of equal ones the first
        least_loaded = heap[0]
        split[least_loaded % ranks].append(index)
        heapq.heapreplace(heap, least_loaded + lengths[index] * one_token + one_sequence)
    return [sorted(members) for members in split]


def split_groups(groups: Sequence[str], num_chunks: int) -> list[list[str]]:
    """Split ``groups`` into ``num_chunks`` runs of even size, or fewer if there are fewer groups."""
    size = -(-len(groups) // num_chunks) if groups else 1
    return [list(groups[start : start + size]) for start in range(0, len(groups), size)]
