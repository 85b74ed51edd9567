"""Run collectives with gradients for tensor and expert parallelism.

Rows of a packed batch are split over the TP ranks as evenly as possible (`shard_sizes`), so a batch need not be padded
to a multiple of TP: only the wire buffer of `gather_rows` is rounded up, by less than one row a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist

from fusion.model.mesh import Mesh

Collective = Callable[[torch.Tensor], torch.Tensor]


def shard_sizes(rows: int, ranks: int) -> list[int]:
    """Return the number of rows of each rank: they differ by at most one, larger shards first."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def shard_range(rows: int, ranks: int, rank: int) -> range:
    """Return the rows of a rank."""
    sizes = shard_sizes(rows, ranks)
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def gather_rows(x_shard: torch.Tensor, rows: int, mesh: Mesh) -> torch.Tensor:
    """Gather [shard, …] of every TP rank into [rows, …] on all of them. Backward: reduce-scatter of the gradients."""
    if mesh.tp_group is None:
        return x_shard
    sizes = shard_sizes(rows, mesh.parallel.tp)
    gather, scatter = partial(_gather_even, sizes=sizes, group=mesh.tp_group), _scatter(sizes, mesh.tp_group)
    return _WithAdjoint.apply(x_shard, gather, scatter)


def reduce_scatter_rows(x_partial: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sum [rows, …] over TP; each rank keeps its shard. Backward: gather."""
    if mesh.tp_group is None:
        return x_partial
    sizes = shard_sizes(x_partial.shape[0], mesh.parallel.tp)
    gather, scatter = partial(_gather_even, sizes=sizes, group=mesh.tp_group), _scatter(sizes, mesh.tp_group)
    return _WithAdjoint.apply(x_partial, scatter, gather)


def sum_over_tp(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sum equally large tensors of all TP ranks, in rank order, on all of them. Backward: the same sum."""
    if mesh.tp_group is None:
        return x
    total = partial(_sum, ranks=mesh.parallel.tp, group=mesh.tp_group)
    return _WithAdjoint.apply(x, total, total)


def exchange_rows(x: torch.Tensor, send: list[int], receive: list[int], mesh: Mesh) -> torch.Tensor:
    """Exchange rows by all-to-all over EP: send ``send[r]`` rows to EP rank r, receive ``receive[r]``, in rank
    order."""
    if mesh.ep_group is None:
        return x
    forth = partial(_exchange, send=send, receive=receive, group=mesh.ep_group)
    back = partial(_exchange, send=receive, receive=send, group=mesh.ep_group)
    return _WithAdjoint.apply(x, forth, back)


def gather_uneven(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather [sizes[rank], …] of every rank of ``group`` in rank order. Backward: sum of partial gradients."""
    if group is None:
        return x
    return _WithAdjoint.apply(x, partial(_gather_uneven, sizes=sizes, group=group), _scatter(sizes, group))


def reduce_scatter_uneven(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum [sum(sizes), …] over ``group``; each rank keeps its ``sizes[rank]`` rows. Backward: gather."""
    if group is None:
        return x
    return _WithAdjoint.apply(x, _scatter(sizes, group), partial(_gather_uneven, sizes=sizes, group=group))


class _WithAdjoint(torch.autograd.Function):
    """Apply a linear collective; its adjoint is the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Collective, adjoint: Collective) -> torch.Tensor:
        ctx.adjoint = adjoint
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return ctx.adjoint(grads[0]), None, None


def _gather_even(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gather shards of `shard_sizes`, padded to the largest."""
    if sizes[0] == sizes[-1]:
        out = x.new_empty(sum(sizes), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out
    wire = x.new_zeros(sizes[0], *x.shape[1:])
    wire[: x.shape[0]] = x
    out = x.new_empty(len(sizes), *wire.shape)
    dist.all_gather_into_tensor(out.flatten(0, 1), wire, group=group)
    return torch.cat([out[rank, :size] for rank, size in enumerate(sizes)])


def _gather_uneven(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    # gloo has no uneven all-gather, so every rank sends its rows to every rank
    ranks = len(sizes)
    return _exchange(torch.cat([x] * ranks), send=[x.shape[0]] * ranks, receive=sizes, group=group)


def _scatter(sizes: list[int], group: dist.ProcessGroup) -> Collective:
    # An exchange and a sum in rank order: the backends' reduction trees add in an order that depends on the buffer's
    # size, which would make a token's bits depend on the batch that it is in.
    num_rows, ranks = sizes[dist.get_rank(group)], len(sizes)

    def scatter(x: torch.Tensor) -> torch.Tensor:
        pieces = _exchange(x, send=sizes, receive=[num_rows] * ranks, group=group)
        return sum_in_order(pieces.view(ranks, num_rows, *x.shape[1:]))

    return scatter


def _sum(x: torch.Tensor, ranks: int, group: dist.ProcessGroup) -> torch.Tensor:
    pieces = x.new_empty(ranks, *x.shape)
    dist.all_gather_into_tensor(pieces.flatten(0, 1), x.contiguous(), group=group)
    return sum_in_order(pieces)


def sum_in_order(pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """Add up tensors one after the other."""
    return reduce(torch.add, pieces)


def _exchange(x: torch.Tensor, *, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out
