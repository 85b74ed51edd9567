"""Run collectives with gradients for tensor and expert parallelism.

Rows of a packed batch are split over the TP ranks as evenly as possible (`shard_sizes`), so a batch need not be padded
to a multiple of TP: only the wire buffer of `gather_rows` is rounded up, by less than one row a rank."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist

from fusion.model.mesh import Mesh
from fusion.model.parallel import Parallel

Collective = Callable[[torch.Tensor], torch.Tensor]


MAX_WHOLE_ROWS, MAX_GATHERED_ROWS = 512, 2048
"""Rows of an attention rank, and of all that are gathered on one, up to which a rank computes on `RowSplit.whole`"""


@dataclass(frozen=True)
class RowSplit:
    """Hold how the ``count`` rows of a pass lie on the TP ranks between blocks. ``whole``: on each TP rank all of
    them, and sums over TP are plain all-reduces, two a layer: for passes so small that a layer takes its time in
    starting operators. Otherwise on each rank its shard (`shard_sizes`), and sums run in rank order. Without gradients
    only. ``by_ep_rank``: where ``whole`` and an EP group spans several attention ranks: the shard of each of its ranks.
    ``dispatched``: whether the card's operators send these shards to their experts; otherwise they are gathered."""

    count: int
    whole: bool = False
    by_ep_rank: tuple[int, ...] = ()
    dispatched: bool = False


def may_be_whole(parallel: Parallel) -> bool:
    """Return whether a layout has `RowSplit.whole`: each EP group is part of a TP group, or consists of whole ones."""
    smaller, larger = sorted((parallel.tp, parallel.ep))
    return parallel.etp == 1 and larger > 1 and larger % smaller == 0


def whole_rows(parallel: Parallel, rank: int, counts: Sequence[int], max_dispatched: int = 0) -> RowSplit:
    """Plan a pass of ``counts`` rows by attention rank, for a layout that `may_be_whole`. Only this rank's count is
    read where its EP group spans no other attention rank. ``max_dispatched``: rows of each rank that operators
    dispatch; every rank must have some."""
    spanned = max(1, parallel.ep // parallel.tp)
    own = parallel.coordinate("dp", rank)
    first = own // spanned * spanned
    gathered = counts[first : first + spanned]
    shards = tuple(size for count in gathered for size in shard_sizes(count, parallel.tp))
    dispatched = spanned > 1 and 0 < min(shards) and max(shards) <= max_dispatched
    if max(gathered) > MAX_WHOLE_ROWS or (sum(gathered) > MAX_GATHERED_ROWS and not dispatched):
        return RowSplit(counts[own])
    return RowSplit(counts[own], whole=True, by_ep_rank=shards if spanned > 1 else (), dispatched=dispatched)


def shard_sizes(rows: int, ranks: int) -> list[int]:
    """Return the number of rows of each rank: they differ by at most one, larger shards first."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def shard_range(rows: int, ranks: int, rank: int) -> range:
    sizes = shard_sizes(rows, ranks)
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def gather_rows(x_shard: torch.Tensor, rows: RowSplit, mesh: Mesh) -> torch.Tensor:
    """Gather [shard, …] of every TP rank into [rows, …] on all of them. Backward: reduce-scatter of the gradients."""
    if mesh.tp_group is None or rows.whole:
        return x_shard
    return gather_shards(x_shard, shard_sizes(rows.count, mesh.parallel.tp), mesh.tp_group)


def reduce_scatter_rows(x_partial: torch.Tensor, rows: RowSplit, mesh: Mesh) -> torch.Tensor:
    """Sum [rows, …] over TP; each rank keeps its shard. Backward: gather."""
    if mesh.tp_group is None:
        return x_partial
    if rows.whole:
        return sum_plainly(x_partial, mesh.tp_group)
    return reduce_scatter_shards(x_partial, shard_sizes(x_partial.shape[0], mesh.parallel.tp), mesh.tp_group)


def gather_shards(x_shard: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather [sizes[rank], …] of every rank of ``group`` in rank order. Backward: reduce-scatter of the gradients."""
    if group is None:
        return x_shard
    return WithAdjoint.apply(x_shard, partial(gather_padded, sizes=sizes, group=group), _scatter(sizes, group))


def reduce_scatter_shards(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum [sum(sizes), …] over ``group``; each rank keeps its ``sizes[rank]`` rows. Backward: gather."""
    if group is None:
        return x
    return WithAdjoint.apply(x, _scatter(sizes, group), partial(gather_padded, sizes=sizes, group=group))


def share_shards(x_shard: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gather [sizes[rank], …] of every rank of ``group``, where each then computes the same value from all of them.
    Backward: this rank's rows of the gradient, so that the value counts once and not once a rank."""
    start, rank = sum(sizes[: dist.get_rank(group)]), dist.get_rank(group)
    own = slice(start, start + sizes[rank])
    return WithAdjoint.apply(x_shard, partial(gather_padded, sizes=sizes, group=group), lambda grad: grad[own])


def rows_to_heads(x_nHC: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange this rank's rows of all H heads for all rows of its heads, the rank-th of equal runs: [N, H / ranks, C].
    ``sizes``: rows of each rank, N in total."""
    to_heads, to_rows = partial(_to_heads, sizes=sizes, group=group), partial(_to_rows, sizes=sizes, group=group)
    return WithAdjoint.apply(x_nHC, to_heads, to_rows)


def heads_to_rows(x_NhC: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange back what `rows_to_heads` has exchanged."""
    to_heads, to_rows = partial(_to_heads, sizes=sizes, group=group), partial(_to_rows, sizes=sizes, group=group)
    return WithAdjoint.apply(x_NhC, to_rows, to_heads)


def _to_heads(x_nHC: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    ranks, rows = len(sizes), x_nHC.shape[0]
    by_rank = x_nHC.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
    return _exchange(by_rank, send=[rows] * ranks, receive=sizes, group=group)


def _to_rows(x_NhC: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    ranks, rows = len(sizes), sizes[dist.get_rank(group)]
    by_rank = _exchange(x_NhC, send=sizes, receive=[rows] * ranks, group=group)
    return by_rank.unflatten(0, (ranks, rows)).transpose(0, 1).flatten(1, 2)


def sum_plainly(x_partial: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum a tensor over a group, in place and in the backend's order. Without gradients."""
    if group is not None:
        dist.all_reduce(x_partial, group=group)
    return x_partial


def sum_pieces(x_partial: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sum [sum(sizes), …] over a group by one reduction of all ranks' pieces; each rank keeps its ``sizes[rank]`` rows.
    Without gradients."""
    num_rows, ranks = sizes[dist.get_rank(group)], len(sizes)
    pieces = _exchange(x_partial, send=list(sizes), receive=[num_rows] * ranks, group=group)
    return pieces.view(ranks, num_rows, *x_partial.shape[1:]).sum(0)


def sum_over_tp(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sum equally large tensors of all TP ranks, in rank order, on all of them. Backward: the same sum."""
    if mesh.tp_group is None:
        return x
    total = partial(_sum, ranks=mesh.parallel.tp, group=mesh.tp_group)
    return WithAdjoint.apply(x, total, total)


def exchange_rows(x: torch.Tensor, send: list[int], receive: list[int], mesh: Mesh) -> torch.Tensor:
    """Exchange rows by all-to-all over EP: send ``send[r]`` rows to EP rank r, receive ``receive[r]``, in rank
    order."""
    if mesh.ep_group is None:
        return x
    forth = partial(_exchange, send=send, receive=receive, group=mesh.ep_group)
    back = partial(_exchange, send=receive, receive=send, group=mesh.ep_group)
    return WithAdjoint.apply(x, forth, back)


class WithAdjoint(torch.autograd.Function):
    """Apply a linear function; its adjoint is the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Collective, adjoint: Collective) -> torch.Tensor:
        ctx.adjoint = adjoint
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return ctx.adjoint(grads[0]), None, None


def gather_padded(x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gather [sizes[rank], …] of every rank, padded to the largest on the wire. Without gradients."""
    largest = max(sizes)
    if largest == min(sizes):
        out = x.new_empty(sum(sizes), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out
    wire = x.new_zeros(largest, *x.shape[1:])
    wire[: x.shape[0]] = x
    out = x.new_empty(len(sizes), *wire.shape)
    dist.all_gather_into_tensor(out.flatten(0, 1), wire, group=group)
    return torch.cat([out[rank, :size] for rank, size in enumerate(sizes)])


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
