"""Divide the samples of a step over minibatches and data-parallel ranks. Pure: a simulation divides them alike.

Invariants of `split_over_ranks`: every sequence is on exactly one rank; indices stay in order inside a rank. Where no
sequence shares rows, two ranks differ by at most the longest sequence, and a rank has no sequence only if there are
fewer sequences than ranks. Where some do, the rank that computes most rows computes no more than with this division of
the sequences one by one."""

import heapq
from collections.abc import Iterator, Sequence


def split_over_ranks(lengths: Sequence[int], ranks: int, shared: Sequence[int] | None = None) -> list[list[int]]:
    """Return the indices of the sequences of each rank, balanced by the rows that it computes (invariants above).
    Longest first, each to the least loaded rank.

    Sequences that share rows go to one rank, or in 2, 4, … parts to several, whichever balances best. ``shared``: rows
    that each sequence would share with the one before it on the same rank (`prefixes.links`); None: nothing."""
    if ranks == 1:
        return [list(range(len(lengths)))]
    if shared is None or not any(shared):
        return _split(lengths, ranks)
    best: tuple[int, list[list[int]]] | None = None
    for runs in _partitions(shared):
        sizes = [sum(lengths[run.start : run.stop]) - sum(shared[run.start + 1 : run.stop]) for run in runs]
        split = [sorted(index for run in chosen for index in runs[run]) for chosen in _split(sizes, ranks)]
        rows = max(sum(_computed(indices, lengths, shared)) for indices in split)
        if best is None or rows < best[0]:
            best = rows, split
    assert best is not None
    return best[1]


def _partitions(shared: Sequence[int]) -> Iterator[list[range]]:
    """Yield divisions of the sequences into runs that share rows, from whole runs to single sequences."""
    starts = [index for index, common in enumerate(shared) if not common]
    trees = [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(shared)], strict=True)]
    longest, parts = max(map(len, trees)), 1
    while parts < 2 * longest:
        yield [
            tree[start : start + size]
            for tree in trees
            for size in [-(-len(tree) // parts)]
            for start in range(0, len(tree), size)
        ]
        parts *= 2


def _computed(indices: Sequence[int], lengths: Sequence[int], shared: Sequence[int]) -> Iterator[int]:
    """Yield the rows that a rank with these sequences computes of each."""
    for before, index in zip([-2, *indices], indices, strict=False):
        yield lengths[index] - (shared[index] if index - 1 == before else 0)


def _split(lengths: Sequence[int], ranks: int) -> list[list[int]]:
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


def split_groups(groups: Sequence[str], num_chunks: int, num_before: int = 0) -> list[list[str]]:
    """Split ``groups`` into ``num_chunks`` runs of even size, or fewer if there are fewer groups. ``num_before``: how
    many others came before and count for the first runs, which have as many fewer, or none."""
    size = max(1, -(-(num_before + len(groups)) // num_chunks))
    starts = range(-num_before, len(groups), size)
    return [list(groups[max(0, start) : max(0, start + size)]) for start in starts]
