"""Plan how ranks exchange the rows of experts.

    counts_LE ─ all-to-all over EP, gather over ETP ─► rows of each local expert by source ─ to the host ─► RowExchange

The collectives that exchange rows take sizes from the host. Where routers choose the experts, the host waits for the
card here, once in a layer and pass. Where they are replayed (`replay`) it counts the rows of all layers at once, tells
the other hosts, and waits for no card. A pass that recomputes another one takes its plan."""

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from fusion.model.collectives import WithAdjoint
from fusion.model.mesh import Mesh
from fusion.npu import to_card


class RowExchange(NamedTuple):
    """Plan an exchange of one layer's rows.
    ``send``, ``receive``: rows to and from each EP rank.
    ``sizes``: rows that arrive at each ETP rank.
    ``order``: indices from (source, expert) to (expert, source), and back, on the card.
    ``rows``: of each local expert; ``rows_on_card``: the same, int64 [E / EP]."""

    send: list[int]
    receive: list[int]
    sizes: list[int]
    order: tuple[torch.Tensor, torch.Tensor]
    rows: list[int]
    rows_on_card: torch.Tensor


def reorder(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return the rows of x in another order, a permutation int64 [n]. The gradient is read by its inverse: an index's
    own backward pass would add it to zeros row by row, which cards do by sorting."""
    return WithAdjoint.apply(x, lambda x: x.index_select(0, order), lambda grad: grad.index_select(0, inverse))


def plan_exchange(counts_LE: torch.Tensor, mesh: Mesh, device: torch.device) -> list[RowExchange]:
    """Plan the exchange of this rank's rows in L layers, of which each expert has ``counts_LE``, int64. Collective over
    EP and ETP, on cards or between hosts, wherever the counts are; from a card they are read once. One copy to
    ``device``."""
    layers, ep = len(counts_LE), mesh.parallel.ep
    own = counts_LE.view(layers, ep, -1).transpose(0, 1).contiguous()
    arriving = own
    if mesh.ep_group is not None:
        arriving = torch.empty_like(own)
        dist.all_to_all_single(arriving, own, group=mesh.ep_group)
    gathered = arriving
    if mesh.etp_group is not None:
        gathered = arriving.new_empty(mesh.parallel.etp * ep, *arriving.shape[1:])
        dist.all_gather_into_tensor(gathered, arriving, group=mesh.etp_group)
    counts = torch.cat([own, gathered]).cpu().numpy()  # [own and by ETP rank, EP rank][layer][local expert] rows
    by_layer = counts.reshape(-1, ep, *counts.shape[1:]).transpose(2, 0, 1, 3)
    by_source = by_layer[:, 1:].reshape(layers, -1, counts.shape[-1])
    tables = [np.concatenate([of_layer.sum(0), *regroup(of_layer)]) for of_layer in by_source]
    on_card = to_card(torch.from_numpy(np.concatenate(tables)), device).split([len(table) for table in tables])
    return [_plan(counts, table, mesh.etp_rank) for counts, table in zip(by_layer, on_card, strict=True)]


def _plan(counts: np.ndarray, on_card: torch.Tensor, etp_rank: int) -> RowExchange:
    """Plan one layer. ``counts``: of this rank's rows, then of those that arrive at each ETP rank, [EP rank, local
    expert] each; ``on_card``: the rows of each local expert and both orders."""
    send, *arriving = counts.sum(-1).tolist()
    rows = counts[1:].sum((0, 1)).tolist()
    rows_on_card, grouping, back = on_card.split([len(rows), sum(rows), sum(rows)])
    return RowExchange(send, arriving[etp_rank], [sum(each) for each in arriving], (grouping, back), rows, rows_on_card)


def regroup(by_source: np.ndarray) -> np.ndarray:
    """Return the indices that reorder rows from (source, expert) to (expert, source), and the inverse: int64 [2, n].
    ``by_source``: rows by [source, expert]."""
    # In numpy, whose calls on small arrays take a fraction of torch's time: this runs in every layer of a decode step.
    starts = by_source.cumsum().reshape(by_source.shape) - by_source
    sizes, place = by_source.T.ravel(), np.arange(by_source.sum())
    grouping = place + np.repeat(starts.T.ravel() - (sizes.cumsum() - sizes), sizes)
    indices = np.empty((2, len(grouping)), np.int64)
    indices[0], indices[1, grouping] = grouping, place
    return indices
