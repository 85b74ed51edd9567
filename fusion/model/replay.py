"""Record the experts that tokens are routed to in one forward pass, and replay them in another.

    engine or trainer    a pass ─ Routed of each layer ─► routing_of ─► experts_NLk, one small integer column
    trainer              experts_NLk ─► Replay ─► a pass with these experts, weighted by its own router

Two programs with the same weights round differently. Where two experts are nearly tied, this changes a token's experts,
and its log-probability jumps. Replaying the engine's routing in the trainer is R3 (arXiv 2510.11370); replaying the
trainer's own routing from before the step's first update is R2 (arXiv 2507.18071, "routing replay")."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusion.model.collectives import RowSplit, gather_padded, gather_rows, shard_range, shard_sizes
from fusion.model.exchange import RowExchange, plan_exchange
from fusion.model.mesh import Mesh
from fusion.model.shared_rows import Reads
from fusion.npu import to_card


class Routed(NamedTuple):
    """Hold the routing of this rank's rows in one MoE layer.
    ``stats``: float32 [2, E], the number of tokens routed to each expert (replayed ones included) and the summed
        probabilities that the pass's own router gives it; [2, 0] in inference mode.
    ``expert_nk``: int64 [n, k], the experts of each row.
    ``mismatched_n``: bool [n], the replayed rows for which the pass's own router chooses a different set of experts;
        None: nothing was replayed.
    ``probs_nE``: float32 [n, E], the probabilities of each row; only where the model's ``keep_probabilities`` is set.
    """

    stats: torch.Tensor
    expert_nk: torch.Tensor
    mismatched_n: torch.Tensor | None = None
    probs_nE: torch.Tensor | None = None

    def weighted(self, weight_n: torch.Tensor) -> "Routed":
        """Return the routing with ``stats`` in which each row counts as ``weight_n`` (float32 [n]) rows; the
        probabilities only where ``probs_nE`` is kept."""
        counts_E, probs_E = self.stats
        counts_E = torch.zeros_like(counts_E).index_add(
            0, self.expert_nk.flatten(), weight_n.repeat_interleave(self.expert_nk.shape[1])
        )
        probs_E = probs_E if self.probs_nE is None else weight_n @ self.probs_nE
        return self._replace(stats=torch.stack([counts_E, probs_E]))

    def read_by(self, reads: Reads) -> "Routed":
        """Return the routing and probabilities of the rows that ``reads`` reads."""
        assert self.probs_nE is not None
        return self._replace(expert_nk=self.expert_nk[reads.rows_R], probs_nE=reads(self.probs_nE))


class Forced(NamedTuple):
    """Hold the replayed experts of one layer, int64 [n, k]; and bool [n, 1], the rows that they were recorded of. The
    others follow their router, unless there is an ``exchange``: the plan by which all are sent to ``expert_nk``."""

    expert_nk: torch.Tensor
    known_n1: torch.Tensor
    exchange: RowExchange | None = None

    def impose(self, own_nk: torch.Tensor) -> torch.Tensor:
        """Return the experts of each row, int64 [n, k], where the router's own choice is ``own_nk``."""
        return self.expert_nk if self.exchange is not None else self.expert_nk.where(self.known_n1, own_nk)

    def mismatched(self, own_nk: torch.Tensor) -> torch.Tensor:
        """Return the replayed rows whose own set of experts differs: bool [n]."""
        # as floats: an NPU sorts no integers
        own, replayed = (expert_nk.to(torch.float32).sort(-1).values for expert_nk in (own_nk, self.expert_nk))
        return (own != replayed).any(-1) & self.known_n1.squeeze(1)


@dataclass(frozen=True)
class Replay:
    """Hold the routing of one packed batch.
    ``experts_NLk``: any integer dtype [N, L, k], for the L sparse layers of this stage; the same on its TP ranks.
    ``known_N``: bool [N], the rows that have a routing; the other rows follow their router.
    ``complete``: the routing is on the host, and names experts that the other rows may be sent to.
    ``exchanges``: the plan of each layer by which all rows are sent."""

    experts_NLk: torch.Tensor
    known_N: torch.Tensor
    complete: bool = False
    exchanges: Sequence[RowExchange] = ()

    def of_rank(self, mesh: Mesh, num_experts: int, device: torch.device) -> "Replay":
        """Return the rows that this TP rank routes, on ``device``, and the plan of their exchange, if the routing is
        ``complete`` and experts are split over ranks: collective over EP and ETP then, between hosts."""
        own = shard_range(len(self.known_N), mesh.parallel.tp, mesh.tp_rank)
        experts_nLk, known_n = self.experts_NLk[own.start : own.stop], self.known_N[own.start : own.stop]
        exchanges, layers = list[RowExchange](), experts_nLk.shape[1]
        if self.complete and layers and not (mesh.ep_group is None and mesh.etp_group is None):
            of_layers = experts_nLk.to(torch.int64) + num_experts * torch.arange(layers).unsqueeze(1)
            counts = of_layers.flatten().bincount(minlength=layers * num_experts)
            exchanges = plan_exchange(counts.view(layers, num_experts), mesh, device)
        return Replay(to_card(experts_nLk, device), to_card(known_n, device), exchanges=exchanges)

    def layer(self, index: int) -> Forced:
        exchange = self.exchanges[index] if self.exchanges else None
        return Forced(self.experts_NLk[:, index].to(torch.int64), self.known_N.unsqueeze(1), exchange)


def routing_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest integer dtype that holds the index of an expert."""
    return next(d for d in (torch.uint8, torch.int16, torch.int32) if num_experts - 1 <= torch.iinfo(d).max)


@torch.no_grad()
def routing_of(routed: Sequence[Routed], rows: int | RowSplit, mesh: Mesh, num_experts: int) -> torch.Tensor:
    """Return the experts of all N rows of a pass in the L sparse layers of this stage: `routing_dtype` [N, L, k] on the
    card. Collective over TP and context parallel, over which the rows are split."""
    experts_nLk = torch.stack([layer.expert_nk for layer in routed], 1).to(routing_dtype(num_experts))
    # sent as bytes, since some backends do not support every integer dtype
    sizes = shard_sizes(rows.count if isinstance(rows, RowSplit) else rows, mesh.parallel.cp)
    own = rows if isinstance(rows, RowSplit) else RowSplit(sizes[mesh.cp_rank])
    wire = gather_rows(experts_nLk.flatten(1).view(torch.uint8), own, mesh)
    if mesh.cp_group is not None:
        wire = gather_padded(wire, sizes, mesh.cp_group)
    return wire.view(experts_nLk.dtype).unflatten(1, experts_nLk.shape[1:])
