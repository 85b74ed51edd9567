"""Run collectives with gradients for tensor and expert parallelism.

Rows of a packed batch are split over the TP ranks as evenly as possible (`shard_sizes`), so a batch need not be padded
to a multiple of TP: only the wire buffer of `gather_rows` is rounded up, by less than one row a rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fusion.model.mesh import Mesh


def shard_sizes(rows: int, ranks: int) -> list[int]:
    """Return the number of rows of each rank: they differ by at most one, larger shards first."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def gather_rows(x_shard: torch.Tensor, rows: int, mesh: Mesh) -> torch.Tensor:
    """Gather [shard, …] of every TP rank into [rows, …] on all of them. Backward: reduce-scatter of the gradients."""
    return x_shard if mesh.tp_group is None else _GatherRows.apply(x_shard, rows, mesh)


def reduce_scatter_rows(x_partial: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sum [rows, …] over TP; each rank keeps its shard. Backward: gather."""
    return x_partial if mesh.tp_group is None else _ReduceScatterRows.apply(x_partial, mesh)


def sum_over_tp(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sum equally large tensors of all TP ranks, in rank order, on all of them. Backward: the same sum."""
    return x if mesh.tp_group is None else _SumOverTP.apply(x, mesh)


def exchange_rows(x: torch.Tensor, send: list[int], receive: list[int], mesh: Mesh) -> torch.Tensor:
    """Exchange rows by all-to-all over EP: send ``send[r]`` rows to EP rank r, receive ``receive[r]``, in rank
    order."""
    return x if mesh.ep_group is None else _ExchangeRows.apply(x, send, receive, mesh)


def gather_uneven(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather [sizes[rank], …] of every rank of ``group`` in rank order. Backward: sum of partial gradients."""
    return x if group is None else _GatherUneven.apply(x, sizes, group)


def reduce_scatter_uneven(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum [sum(sizes), …] over ``group``; each rank keeps its ``sizes[rank]`` rows. Backward: gather."""
    return x if group is None else _ReduceScatterUneven.apply(x, sizes, group)


def _gather(x: torch.Tensor, rows: int, mesh: Mesh) -> torch.Tensor:
    ranks = mesh.parallel.tp
    sizes = shard_sizes(rows, ranks)
    if sizes[0] == sizes[-1]:
        out = x.new_empty(rows, *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=mesh.tp_group)
        return out
    wire = x.new_zeros(sizes[0], *x.shape[1:])
    wire[: x.shape[0]] = x
    out = x.new_empty(ranks, *wire.shape)
    dist.all_gather_into_tensor(out.flatten(0, 1), wire, group=mesh.tp_group)
    return torch.cat([out[rank, :size] for rank, size in enumerate(sizes)])


def _reduce_scatter(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    # An exchange and a sum in rank order: the backends' reduction trees add in an order that depends on the buffer's
    # size, which would make a token's bits depend on the batch that it is in.
    assert mesh.tp_group is not None
    return _sum_scattered(x, shard_sizes(x.shape[0], mesh.parallel.tp), mesh.tp_group)


def _sum_scattered(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    num_rows = sizes[dist.get_rank(group)]
    pieces = x.new_empty(len(sizes), num_rows, *x.shape[1:])
    dist.all_to_all_single(pieces.flatten(0, 1), x.contiguous(), [num_rows] * len(sizes), sizes, group=group)
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def _gather_uneven(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    # gloo has no uneven all-gather, so every rank sends its rows to every rank
    ranks, out = len(sizes), x.new_empty(sum(sizes), *x.shape[1:])
    dist.all_to_all_single(out, torch.cat([x] * ranks), sizes, [x.shape[0]] * ranks, group=group)
    return out


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _gather(x, rows, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _reduce_scatter(grads[0], ctx.mesh), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh, ctx.rows = mesh, x.shape[0]
        return _reduce_scatter(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _gather(grads[0], ctx.rows, ctx.mesh), None


class _SumOverTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _sum(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _sum(grads[0], ctx.mesh), None


def _sum(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    pieces = x.new_empty(mesh.parallel.tp, *x.shape)
    dist.all_gather_into_tensor(pieces.flatten(0, 1), x.contiguous(), group=mesh.tp_group)
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


class _GatherUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gather_uneven(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _sum_scattered(grads[0], ctx.sizes, ctx.group), None, None


class _ReduceScatterUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _sum_scattered(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _gather_uneven(grads[0].contiguous(), ctx.sizes, ctx.group), None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, send: list[int], receive: list[int], mesh: Mesh) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.mesh = send, receive, mesh
        return _exchange(x, send, receive, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _exchange(grads[0], ctx.receive, ctx.send, ctx.mesh), None, None, None


def _exchange(x: torch.Tensor, send: list[int], receive: list[int], mesh: Mesh) -> torch.Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=mesh.ep_group)
    return out
