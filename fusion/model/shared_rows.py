"""Compute the rows of a common prefix once for all packed sequences that have it.

    sequences   | A A A A a a | A A A A b | A A A A b c |      N rows, of which sequence i shares its first shared[i]
    computed    | A A A A a a |         b |           c |      M rows, with those of sequence i - 1
    row_N         0 1 2 3 4 5   0 1 2 3 6   0 1 2 3 6 7

All layers but attention compute rows by themselves. In attention each sequence's own rows read the keys and values of
the whole sequence, copied to lie one behind the other: no operator of a card takes ancestors, all take fewer queries
than keys.

Invariant: gradients of a row are summed over those who read it in their order, by no atomic addition."""

from collections.abc import Sequence
from functools import cached_property, partial

import torch

from fusion.model.collectives import WithAdjoint
from fusion.npu import to_card


class SharedRows:
    """Hold where the N rows of packed sequences are computed, if sequence i shares its first ``shared[i]`` rows with
    the one before it. ``count``: number of computed rows, M. ``row_N``: int64, the computed row of each row. ``own_N``:
    bool, the rows that are computed for the sequence they belong to: M of them, in order."""

    def __init__(self, lengths: Sequence[int], shared: Sequence[int]):
        self.lengths, self.shared = list(lengths), list(shared)
        self.row_N = torch.empty(sum(lengths), dtype=torch.int64)
        self.own_N = torch.ones(sum(lengths), dtype=torch.bool)
        before = start = self.count = 0
        for length, common in zip(lengths, shared, strict=True):
            own = length - common
            self.row_N[start : start + common] = self.row_N[before : before + common]
            self.row_N[start + common : start + length] = torch.arange(self.count, self.count + own)
            self.own_N[start : start + common] = False
            before, start, self.count = start, start + length, self.count + own

    @cached_property
    def sequences_M(self) -> torch.Tensor:
        """The number of sequences that each computed row belongs to: float32."""
        return self.row_N.bincount(minlength=self.count).to(torch.float32)


class Reads:
    """Read rows of a tensor, some of them several times: [M, …] → [R, …], with gradient. ``rows_R``: int64 on the
    host, the row that each read reads."""

    def __init__(self, rows_R: torch.Tensor, device: torch.device | str):
        order = rows_R.argsort(stable=True)
        rows, counts = rows_R[order].unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        self.rows_R = to_card(rows_R, device)
        self.by_count: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Rows that are read equally often, and the reads of each"""
        for count in counts.unique().tolist():
            reads = order[starts[counts == count].unsqueeze(1) + torch.arange(count)]
            self.by_count.append((to_card(rows[counts == count], device), to_card(reads, device)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return WithAdjoint.apply(x, lambda x: x.index_select(0, self.rows_R), partial(self._sums, num_rows=len(x)))

    def _sums(self, grad: torch.Tensor, num_rows: int) -> torch.Tensor:
        total = grad.new_zeros(num_rows, *grad.shape[1:])
        for rows, reads in self.by_count:
            parts = grad.index_select(0, reads.flatten())
            if reads.shape[1] > 1:
                summed = torch.promote_types(grad.dtype, torch.float32)
                parts = parts.unflatten(0, reads.shape).sum(1, dtype=summed).to(grad.dtype)
            total.index_copy_(0, rows, parts)
        return total
