"""Plan how ranks exchange the rows of one layer's experts.

    counts_E ─ all-to-all over EP, gather over ETP ─► rows of each local expert by source ─ to the host ─► RowExchange

The collectives that exchange rows take sizes from the host, which waits for the card here: once in a layer and pass. A
pass that recomputes another one exchanges the same rows, and takes its plan."""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from fusion.model.mesh import Mesh


class RowExchange(NamedTuple):
    """Plans an exchange of one layer's rows.
    ``send``, ``receive``: rows to and from each EP rank.
    ``sizes``: rows that arrive at each ETP rank.
    ``order``: indices from (source, expert) to (expert, source), and back.
    ``rows``: of each local expert, on the card if its operators take them from there."""

    send: list[int]
    receive: list[int]
    sizes: list[int]
    order: tuple[torch.Tensor, torch.Tensor]
    rows: list[int] | torch.Tensor


def reorder(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return the rows of x in another order, a permutation int64 [n]. The gradient is read by its inverse: an index's
    own backward pass would add it to zeros row by row, which cards do by sorting."""
    return _Reorder.apply(x, order, inverse)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor):
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return grads[0].index_select(0, ctx.inverse), None, None


def plan_exchange(counts_E: torch.Tensor, mesh: Mesh, on_card: bool) -> RowExchange:
    """Plan the exchange of this rank's rows, of which each expert has ``counts_E``. Collective over EP and ETP."""
    arriving = _exchange_counts(counts_E, mesh)
    counts = torch.cat([counts_E, arriving.flatten()]).view(1 + mesh.parallel.etp, mesh.parallel.ep, -1).tolist()
    tables = counts[1:]
    by_source = [row for table in tables for row in table]  # [etp rank, source rank][local expert] rows
    return RowExchange(
        send=[sum(row) for row in counts[0]],
        receive=[sum(row) for row in tables[mesh.etp_rank]],
        sizes=[sum(map(sum, table)) for table in tables],
        order=regroup(by_source, counts_E.device),
        rows=arriving.sum(0) if on_card else [sum(column) for column in zip(*by_source, strict=True)],
    )


def _exchange_counts(counts_E: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the number of rows that arrive at each local expert, int64 [etp ranks * source ranks, E / EP], on the
    card."""
    arriving = counts_E
    if mesh.ep_group is not None:
        arriving = torch.empty_like(counts_E)
        dist.all_to_all_single(arriving, counts_E, group=mesh.ep_group)
    gathered = arriving
    if mesh.etp_group is not None:
        gathered = arriving.new_empty(mesh.parallel.etp * arriving.numel())
        dist.all_gather_into_tensor(gathered, arriving, group=mesh.etp_group)
    return gathered.view(mesh.parallel.etp * mesh.parallel.ep, -1)


def regroup(by_source: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices that reorder rows from (source, expert) to (expert, source), and the inverse; both int64 [n].
    ``by_source``: rows by [source][expert]."""
    # In numpy, whose calls on small arrays take a fraction of torch's time: this runs in every layer of a decode step.
    counts = np.array(by_source)
    starts = counts.cumsum().reshape(counts.shape) - counts
    sizes, place = counts.T.ravel(), np.arange(counts.sum())
    grouping = place + np.repeat(starts.T.ravel() - (sizes.cumsum() - sizes), sizes)
    indices = np.empty((2, len(grouping)), np.int64)
    indices[0], indices[1, grouping] = grouping, place
    grouping_n, back_n = torch.from_numpy(indices).to(device)  # both by one copy
    return grouping_n, back_n
