"""Decide which sequences share the rows of their common prefix. Pure: decided from lengths, never from a clock.

    sequences   | A A A A a a | A A A A b | A A A A b c |      shared = [0, 4, 5]
    computed    | A A A A a a |         b |           c |      rows 0 to shared[i] of sequence i are those of i - 1

A sequence shares with the one before it, whose first rows may be those of one before that: the paths of a prefix tree
whose leaves are the sequences, in their order. Siblings share at least their prompt, branches of a conversation what
they have in common.

Invariants of `links`: a sequence shares no more than it has in common with the one before it; with `auto` only if its
link pays (`pays`), with `off` nothing. Invariants of `runs`: every sequence is in exactly one run, in order; all
sequences of a run but the first share with the one before; a run takes at most the budget, or is a single sequence;
one that shares begins a run only where it would exceed the budget."""

from collections.abc import Sequence

SHARE_PREFIXES = ("auto", "on", "off")

ROWS_OF_LINK = 64
"""Rows whose computation takes as long as what a further sequence costs attention whatever its length: half a tile of
queries of a fused kernel, or a call and a mask of a composed one"""
READS_OF_ROW = 16
"""Keys and values that are copied, and their gradients summed, in the time and the memory of computing one row. Of
Qwen3-30B-A3B a layer computes 0.4 GFLOP a row in both passes, and copies some 16 KB: about a hundred on an accelerator;
of a tiny model on a CPU, fewer"""


def rows_saved(length: int, common: int) -> int:
    """Return how many rows less a sequence of ``length`` takes if it shares its first ``common``: its own rows then
    read copies of the keys and values of the whole sequence. 0 where that costs as much or more."""
    return max(0, common - ROWS_OF_LINK - length // READS_OF_ROW)


def pays(length: int, common: int) -> bool:
    """Return whether sharing its first ``common`` rows saves a sequence of ``length`` more than it costs."""
    return rows_saved(length, common) > 0


def links(lengths: Sequence[int], common: Sequence[int], share: str) -> list[int]:
    """Return how many of its first rows each sequence shares with the one before it (invariants above). ``common``:
    tokens that each has in common with the one before it; of the first, 0. ``share``: one of SHARE_PREFIXES."""
    if share == "off":
        return [0] * len(lengths)
    return [same if share == "on" or pays(length, same) else 0 for length, same in zip(lengths, common, strict=True)]


def may_share(lengths: Sequence[int], share: str) -> bool:
    """Return whether sequences of these lengths would share rows, were each the beginning of the next or continued by
    it: only then are their tokens compared."""
    return any(links(lengths, [0, *map(min, lengths, lengths[1:])][: len(lengths)], share))


def links_within(lengths: Sequence[int], common: Sequence[int], share: str, budget: int) -> list[int]:
    """Return `links` without those between micro-batches of a ``budget``, whose first sequence shares nothing."""
    shared = links(lengths, common, share)
    for run, _ in runs(lengths, shared, budget):
        shared[run.start] = 0
    return shared


def runs(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[tuple[range, int]]:
    """Return the runs of sequences that are computed together, and how much of the budget each takes: its computed
    rows, and the copies of keys and values of runs that share (invariants above)."""
    grouped: list[tuple[range, int]] = []
    for index, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        run, taken = grouped[-1] if grouped else (range(0), 0)
        first = lengths[run.start] if len(run) == 1 else 0  # whose keys and values are copied with those that share
        more = length - common + (length + first) // READS_OF_ROW
        if common and taken + more <= budget:
            grouped[-1] = range(run.start, index + 1), taken + more
        else:
            grouped.append((range(index, index + 1), length))
    return grouped
