"""Sum segments of values, such as the tokens of sequences, in an order that depends on nothing but the segment.

    values of two segments     a  b  c       d    e    f    g    h
    + the sum 1 behind         ab bc c       de   ef   fg   gh   h
    + the sum 2 behind         abc bc c      defg efgh fgh  gh   h
    + the sum 4 behind         abc …         defgh …                     the first of each segment is its sum

A card adds by index with atomics, in an order that differs between runs. These are elementwise operations.

Invariant: the sum of a segment is to the bit the same in every run, wherever it lies and whatever lies beside it."""

from collections.abc import Sequence

import torch

from fusion.npu import to_card


class Segments:
    """Hold where S segments of n values lie, one behind the other. ``lengths``: of each, int64 on the host.
    ``owner_n``: int64 on the card, the segment of each value."""

    def __init__(self, lengths: Sequence[int] | torch.Tensor, device: torch.device | str):
        sizes = torch.as_tensor(lengths, dtype=torch.int64)
        owner_n, ends = owners(sizes), sizes.cumsum(0)
        left = torch.cat([ends[owner_n] - torch.arange(len(owner_n)), torch.ones(1, dtype=torch.int64)])
        first = (ends - sizes).where(sizes > 0, len(owner_n))  # of an empty segment a zero behind all values
        self.longest = int(sizes.numpy().max(initial=0))
        self.owner_n, self._left, self._first = (to_card(column, device) for column in (owner_n, left, first))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of each segment, 0 of an empty one: [n, …] → [S, …]. Without gradients."""
        total = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        left = self._left.view(-1, *[1] * (values.dim() - 1))
        step = 1
        while step < self.longest:
            total = (total + total.roll(-step, 0)).where(left > step, total)
            step *= 2
        return total.index_select(0, self._first)


def owners(lengths: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Return the index of the segment that each value belongs to: int64 [n], on the host."""
    sizes = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.arange(len(sizes)).repeat_interleave(sizes)
