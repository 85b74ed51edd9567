"""Compute the sparse MLP: route tokens, dispatch them to their experts, run the grouped SwiGLU, combine; add the output
of a shared expert.

    x_nD ─ router ─► top-k ─ sort by expert ─ all-to-all ─► group by local expert ─ grouped matmul ─┐
                          out_nD ◄─ Σ weight · y ◄─ back in order ◄─ all-to-all ◄────────────────────┘

Every rank contributes its own rows (rows are split over TP between blocks), so no token is computed twice. Where an
expert is split over ranks (expert-TP), these gather each other's rows after the first all-to-all and reduce-scatter
their partial sums before the second. The sum over the k experts of a token runs in the router's order, never in order
of arrival.

A small pass of an engine on a card (`RowSplit.whole`) exchanges no counts, for which the host would have to wait: every
rank of an EP group routes all rows of the group, runs its own experts on them, and the ranks' sums are added up.

    x_ND ─ gather over EP ─ router ─► top-k ─ sort, own experts first ─ grouped matmul ─ Σ weight · y ─ sum over EP ─►
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fusion.model.collectives import (
    RowSplit,
    WithAdjoint,
    exchange_rows,
    gather_padded,
    gather_rows,
    gather_shards,
    reduce_scatter_rows,
    reduce_scatter_shards,
    shard_range,
    sum_pieces,
    sum_plainly,
)
from fusion.model.exchange import RowExchange, plan_exchange, reorder
from fusion.model.matrix import Adapted, Matrix, Weights, base_of, below, blocks_of, parameter, project
from fusion.model.mesh import Mesh
from fusion.model.replay import Forced, Routed
from fusion.model.spec import Sparse
from fusion.npu.operators import Plain, linear, sigmoid
from fusion.npu.operators.gating import choose_with_scores, probabilities, score, weigh


class MLP(nn.Module):
    def __init__(self, mesh: Mesh, operators: Plain, weights: Weights):
        super().__init__()
        self.mesh, self.operators = mesh, operators
        self.gate_up = parameter("gate_up", weights)
        self.down = parameter("down", weights)

    def forward(self, x: torch.Tensor, rows: RowSplit, row_multiple: int) -> torch.Tensor:
        """Return the output [n, D] for this TP rank's rows x [n, D]."""
        return reduce_scatter_rows(self.partial(gather_rows(x, rows, self.mesh), row_multiple), rows, self.mesh)

    def partial(self, x_ND: torch.Tensor, row_multiple: int) -> torch.Tensor:
        """Return what this rank's channels contribute to the output [N, D] of all rows."""
        return project(self.operators.swiglu(project(x_ND, self.gate_up, row_multiple)), self.down, row_multiple)


_NO_STATS = torch.empty(2, 0)


class Expert(nn.Module):
    """Hold the matrices of one expert, or the stacks [E, …] of those of all experts of this rank."""

    def __init__(self, weights: Weights):
        super().__init__()
        self.gate_up = parameter("gate_up", weights)
        self.down = parameter("down", weights)


class ExpertAdapters:
    """Hold the adapters of equal matrices of a rank's experts: lists of A and of B, or a stack of each."""

    def __init__(self, matrices: list[Adapted], stacked: bool):
        self._first = matrices[0]
        self.a: Any = self._first.lora_a if stacked else [matrix.lora_a for matrix in matrices]
        self.b: Any = self._first.lora_b if stacked else [matrix.lora_b for matrix in matrices]

    @classmethod
    def of(cls, matrices: Sequence[Matrix], stacked: bool) -> "ExpertAdapters | None":
        """Return those of matrices that have some; None: they have none."""
        adapted = [matrix for matrix in matrices if isinstance(matrix, Adapted)]
        return cls(adapted, stacked) if adapted else None

    @property
    def scale(self) -> float:
        return self._first.scale


class MoE(nn.Module):
    def __init__(self, spec: Sparse, mesh: Mesh, operators: Plain, weights: Weights):
        super().__init__()
        self.spec, self.mesh, self.operators = spec, mesh, operators
        self.keep_probabilities = False
        self.router = parameter("router", weights)
        corrected = spec.router.correction
        self.correction = nn.Parameter(weights["correction"], requires_grad=False) if corrected else None
        num_local = spec.num_experts // mesh.parallel.ep
        self.local_experts = range(mesh.ep_rank * num_local, (mesh.ep_rank + 1) * num_local)
        # Looked up once: attribute access of modules takes measurable time in a decode step.
        self._matrices: tuple[Any, Any]
        stacked = "experts.gate_up" in weights
        if stacked:
            stacks = Expert(below("experts.", weights))
            self.experts: nn.Module = stacks
            gate_up, down = [stacks.gate_up], [stacks.down]
            self._matrices, self._cut = (base_of(stacks.gate_up), base_of(stacks.down)), False
        else:
            experts = {str(e): Expert(below(f"experts.{e}.", weights)) for e in self.local_experts}
            self.experts = nn.ModuleDict(experts)
            gate_up, down = [expert.gate_up for expert in experts.values()], [one.down for one in experts.values()]
            self._matrices = [base_of(matrix) for matrix in gate_up], [base_of(matrix) for matrix in down]
            self._cut = not all(isinstance(matrix, nn.Parameter) for matrices in self._matrices for matrix in matrices)
        self._adapters = [ExpertAdapters.of(each, stacked) for each in (gate_up, down)]
        shared = below("shared.", weights)
        self.shared = MLP(mesh, operators, shared) if spec.shared else None
        self.shared_gate = parameter("shared_gate", weights) if spec.shared and spec.shared.gated else None
        self._router = spec.router

    def forward(
        self,
        x_nD: torch.Tensor,
        row_multiple: int,
        forced: Forced | None = None,
        *,
        record: bool = True,
        rows: RowSplit | None = None,
        kept: list[RowExchange] | None = None,
    ) -> tuple[torch.Tensor, Routed | None]:
        """Return the output [n, D] and, where ``record``, the routing. Rows with ``forced`` experts are sent to these,
        weighted by the scores that this router gives them (with gradient), normalised like its own choice. ``rows``: of
        the batch, of which x_nD holds this TP rank's; None: x_nD is the batch. ``kept``: empty, receives what is
        exchanged; filled, as in a recomputation of the pass, it is exchanged again."""
        rows = RowSplit(len(x_nD)) if rows is None else rows
        if rows.whole:
            return self._whole(x_nD, rows, row_multiple, record=record)
        if forced is None and torch.is_inference_mode_enabled():  # an engine, which needs no statistics for a loss
            logits_nE = self._logits(x_nD, row_multiple)
            weight_nk, expert_nk = self.operators.gate(logits_nE, self._router, self.correction, row_multiple)
            routed = Routed(_NO_STATS, expert_nk) if record else None
            y = self._experts(x_nD, expert_nk, weight_nk, row_multiple, kept)[0]
        else:
            y, routed = self._trained(x_nD, row_multiple, forced, record=record, kept=kept)
        if self.shared is not None:
            y = y + self._gated(x_nD, self.shared(x_nD, rows, row_multiple), row_multiple)
        return y, routed

    def _trained(
        self,
        x_nD: torch.Tensor,
        row_multiple: int,
        forced: Forced | None,
        *,
        record: bool,
        kept: list[RowExchange] | None,
    ) -> tuple[torch.Tensor, Routed | None]:
        router, mismatched_n = self._router, None
        scores_nE = score(self._logits(x_nD, row_multiple), router, row_multiple)
        weight_nk, expert_nk = choose_with_scores(scores_nE, router, self.correction)
        if forced is not None:
            mismatched_n, expert_nk = forced.mismatched(expert_nk), forced.impose(expert_nk)
            weight_nk = scores_nE.gather(-1, expert_nk)
            kept = kept if forced.exchange is None else [forced.exchange]
        y, counts_E = self._experts(x_nD, expert_nk, weigh(weight_nk, router), row_multiple, kept)
        if not record:
            return y, None
        probs_nE = probabilities(scores_nE, router)
        stats = torch.stack([counts_E.to(torch.float32), probs_nE.sum(0)])
        return y, Routed(stats, expert_nk, mismatched_n, probs_nE if self.keep_probabilities else None)

    def _logits(self, x_nD: torch.Tensor, row_multiple: int) -> torch.Tensor:
        if not self.spec.router.float32 or x_nD.dtype == torch.float32:
            return project(x_nD, self.router, row_multiple)
        x32, blocks = x_nD.to(torch.float32), blocks_of(self.router)
        logits = [linear(x32, block.to(torch.float32), row_multiple) for block in blocks]
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)

    def _gated(self, x_nD: torch.Tensor, y_nD: torch.Tensor, row_multiple: int) -> torch.Tensor:
        """Multiply the output of the shared expert by its gate, if it has one."""
        if self.shared_gate is None:
            return y_nD
        return sigmoid(project(x_nD, self.shared_gate, row_multiple), row_multiple) * y_nD

    def _whole(
        self, x_ND: torch.Tensor, rows: RowSplit, row_multiple: int, *, record: bool
    ) -> tuple[torch.Tensor, Routed | None]:
        """Compute all rows of this attention rank, with the sums over TP and EP."""
        if rows.dispatched:
            return self._dispatched(x_ND, rows, row_multiple, record=record)
        mesh, own, gathered_ND = self.mesh, slice(None), x_ND
        tp, ep = mesh.parallel.tp, mesh.parallel.ep
        if rows.by_ep_rank:
            assert mesh.ep_group is not None
            shard = shard_range(rows.count, tp, mesh.tp_rank)
            gathered_ND = gather_padded(x_ND[shard.start : shard.stop], rows.by_ep_rank, mesh.ep_group)
            start = sum(rows.by_ep_rank[: mesh.ep_rank - mesh.tp_rank])
            own = slice(start, start + rows.count)
        logits_NE = self._logits(gathered_ND, row_multiple)
        weight_Nk, expert_Nk = self.operators.gate(logits_NE, self._router, self.correction, row_multiple)
        num_experts, table = self.spec.num_experts, self.operators
        y = table.local_experts(gathered_ND, expert_Nk, weight_Nk, num_experts, self.local_experts, self._matrices)
        routed = Routed(_NO_STATS, expert_Nk[own]) if record else None
        shared = None
        if self.shared is not None:
            shared = self._gated(x_ND, self.shared.partial(x_ND, row_multiple), row_multiple)
        if shared is not None and ep == tp:  # one sum over the ranks of both
            return sum_plainly(y + shared, mesh.tp_group), routed
        if rows.by_ep_rank:
            assert mesh.ep_group is not None
            y = gather_rows(sum_pieces(y, rows.by_ep_rank, mesh.ep_group), RowSplit(rows.count), mesh)
        else:
            y = sum_plainly(y, mesh.ep_group)
        return (y if shared is None else y + sum_plainly(shared, mesh.tp_group)), routed

    def _dispatched(
        self, x_ND: torch.Tensor, rows: RowSplit, row_multiple: int, *, record: bool
    ) -> tuple[torch.Tensor, Routed | None]:
        """Compute as `_whole`, by the card's operators, which send this TP rank's shard to its experts."""
        mesh, shards = self.mesh, RowSplit(rows.count)
        assert mesh.dispatch_group is not None
        shard = shard_range(rows.count, mesh.parallel.tp, mesh.tp_rank)
        x_nD = x_ND[shard.start : shard.stop]
        logits_nE = self._logits(x_nD, row_multiple)
        weight_nk, expert_nk = self.operators.gate(logits_nE, self._router, self.correction, row_multiple)
        experts = mesh.dispatch_group, max(rows.by_ep_rank), self._matrices
        y = gather_rows(self.operators.dispatched_experts(x_nD, expert_nk, weight_nk, *experts), shards, mesh)
        if self.shared is not None:
            shared = self._gated(x_ND, self.shared.partial(x_ND, row_multiple), row_multiple)
            y = y + sum_plainly(shared, mesh.tp_group)
        return y, Routed(_NO_STATS, gather_rows(expert_nk, shards, mesh)) if record else None

    def _experts(
        self,
        x_nD: torch.Tensor,
        expert_nk: torch.Tensor,
        weight_nk: torch.Tensor,
        row_multiple: int,
        kept: list[RowExchange] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sum of each row's experts [n, D], and how many rows each expert has, int64 [E]."""
        x, order, counts_E = self.operators.permute(x_nD, expert_nk, self.spec.num_experts)
        # With a grouped product that takes counts on the card, the host need not wait for them.
        on_card = not self._cut and self.operators.takes_counts(x, len(self.local_experts), row_multiple)
        mesh = self.mesh
        if mesh.ep_group is None and mesh.etp_group is None:
            y = self._swiglu(x, counts_E if on_card else counts_E.tolist(), row_multiple)
        else:
            kept = [] if kept is None else kept
            if not kept:
                kept += plan_exchange(counts_E.unsqueeze(0), mesh, counts_E.device)
            y = self._exchanged(x, kept[0], row_multiple, on_card)
        return self.operators.unpermute(y, order, weight_nk), counts_E

    def _exchanged(self, x: torch.Tensor, plan: RowExchange, row_multiple: int, on_card: bool) -> torch.Tensor:
        """Run the experts of all ranks on rows sorted by expert; return their outputs in the same order."""
        mesh, (grouping, back) = self.mesh, plan.order
        arrived = exchange_rows(x, plan.send, plan.receive, mesh=mesh)
        x = reorder(gather_shards(arrived, plan.sizes, mesh.etp_group), grouping, back)
        y = self._swiglu(x, plan.rows_on_card if on_card else plan.rows, row_multiple)
        y = reduce_scatter_shards(reorder(y, back, grouping), plan.sizes, mesh.etp_group)
        return exchange_rows(y, plan.receive, plan.send, mesh=mesh)

    def _swiglu(self, x: torch.Tensor, counts: list[int] | torch.Tensor, row_multiple: int) -> torch.Tensor:
        if not self._cut and not any(adapters and adapters.scale for adapters in self._adapters):
            return self.operators.experts(x, counts, self._matrices, row_multiple)
        inner = self.operators.swiglu(self._product(0, x, counts, row_multiple))
        return self._product(1, inner, counts, row_multiple)

    def _product(self, index: int, x: torch.Tensor, counts: list[int] | torch.Tensor, multiple: int) -> torch.Tensor:
        """Compute a grouped product with gate and up (0) or down (1), and add that with their adapters. Matrices that
        are cut into blocks of rows are all cut alike."""
        matrices, adapters, grouped = self._matrices[index], self._adapters[index], self.operators.grouped_linear
        if self._cut:
            blocks = zip(*(blocks_of(matrix) for matrix in matrices), strict=True)
            y = torch.cat([grouped(x, each, counts, multiple) for each in blocks], dim=-1)
        else:
            y = grouped(x, matrices, counts, multiple)
        if adapters is None or not adapters.scale:
            return y
        return y + grouped(grouped(x, adapters.a, counts, multiple) * adapters.scale, adapters.b, counts, multiple)


def load_balancing_loss(stats: list[torch.Tensor], total_counts_E: torch.Tensor, total_rows: int) -> torch.Tensor:
    """Compute the auxiliary loss of Switch Transformers as transformers does for Qwen3-MoE, over all layers at once.

    E · Σ_e f_e P_e, with f_e the mean number of times a token is routed to expert e, and P_e its mean probability.
    Where routing is replayed, f_e counts the replayed routing (the actual load) and P_e is this model's own, so that
    the gradient still shifts probability away from loaded experts.
    ``stats``: `Routed.stats` of each layer, float32 [2, E], over this rank's rows.
    ``total_counts_E``: tokens routed to each expert, summed over layers, of the whole batch.
    ``total_rows``: rows × layers of the whole batch, so that the losses of ranks and micro-batches add up to the
        batch's.
    Return a float32 scalar."""
    probs_E = torch.stack(stats)[:, 1].sum(0)
    return probs_E.numel() * (total_counts_E / total_rows * probs_E / total_rows).sum()


def sequence_balancing_loss(routed: Routed, owner_n: torch.Tensor, lengths: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Compute this rank's share of one layer's load-balancing loss of each sequence, and sum them (DeepSeek-V3, arXiv
    2412.19437, equations 17 to 20).

    Σ_e f_e P_e, with f_e = E / (k T) times the number of the sequence's T tokens that are routed to expert e, of which
    replayed ones count, and P_e their mean probability. Collective over TP and context parallel, whose ranks have rows
    of the same sequences: the shares add up to the loss.
    ``routed``: with ``probs_nE``, of this rank's rows.
    ``owner_n``: int64 [n], the sequence of each row.
    ``lengths``: float32 [S], the tokens of each sequence.
    Return a float32 scalar."""
    assert routed.probs_nE is not None
    num_experts, top_k = routed.probs_nE.shape[1], routed.expert_nk.shape[1]
    places = (owner_n.unsqueeze(1) * num_experts + routed.expert_nk).flatten()
    counts = routed.probs_nE.new_zeros(len(lengths) * num_experts)
    counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.float32))
    for group in (mesh.tp_group, mesh.cp_group):
        if group is not None:
            dist.all_reduce(counts, group=group)
    weight_SE = num_experts / top_k * counts.view(-1, num_experts) / lengths.clamp(min=1).square().unsqueeze(1)

    def weigh_rows(x: torch.Tensor) -> torch.Tensor:
        return weight_SE.index_select(0, owner_n) * x

    return WithAdjoint.apply(routed.probs_nE, lambda probs_nE: weigh_rows(probs_nE).sum(), weigh_rows)
