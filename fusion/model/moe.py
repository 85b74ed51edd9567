"""The sparse MLP: route, send tokens to their experts, grouped SwiGLU, send them back.

    x_nD ─ router ─► top-k ─ sort by expert ─ all-to-all ─► group by local expert ─ grouped matmul ─┐
                          out_nD ◄─ Σ weight · y ◄─ back in order ◄─ all-to-all ◄────────────────────┘

Every rank brings its own rows (rows are split over TP between blocks), so no token is computed twice. Where an expert
is cut over ranks (expert-TP) they gather each other's rows after the first all-to-all and reduce-scatter their partial
sums before the second. Sums over the k experts of a token run in the router's order, never in order of arrival.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fusion.model.collectives import exchange_rows, gather_uneven, reduce_scatter_uneven
from fusion.model.config import ModelConfig
from fusion.model.matrix import Matrix, Weights, blocks_of, parameter, project
from fusion.model.mesh import Mesh
from fusion.model.replay import Forced, Routed
from fusion.npu.ops import grouped_linear


class Expert(nn.Module):
    def __init__(self, weights: Weights):
        super().__init__()
        self.gate_up = parameter("gate_up", weights)
        self.down = parameter("down", weights)


class MoE(nn.Module):
    def __init__(self, config: ModelConfig, mesh: Mesh, weights: Weights):
        super().__init__()
        self.config, self.mesh = config, mesh
        self.router = parameter("router", weights)
        here = config.num_experts // mesh.parallel.ep
        own = range(mesh.ep_rank * here, (mesh.ep_rank + 1) * here)
        below: dict[int, Weights] = {expert: {} for expert in own}
        for name, view in weights.items():
            if name.startswith("experts."):
                _, expert, matrix = name.split(".", 2)
                below[int(expert)][matrix] = view
        self.experts = nn.ModuleDict({str(expert): Expert(matrices) for expert, matrices in below.items()})
        # Looked up once: a decode step feels what nn.Module takes to find an attribute.
        self._gate_up: list[Any] = [expert.gate_up for expert in self.experts.values()]
        self._down: list[Any] = [expert.down for expert in self.experts.values()]

    def forward(
        self, x_nD: torch.Tensor, row_multiple: int, forced: Forced | None = None
    ) -> tuple[torch.Tensor, Routed]:
        """Returns the output [n, D] and what the router did. Rows with ``forced`` experts go there, weighed by the
        probabilities that this router gives them (with gradient), normalised as its own choice would be."""
        probs_nE = project(x_nD, self.router, row_multiple).softmax(-1, dtype=torch.float32)
        weight_nk, expert_nk = probs_nE.topk(self.config.top_k, dim=-1)
        strayed = None
        if forced is not None:
            strayed, expert_nk = forced.strayed(expert_nk), forced.impose(expert_nk)
            weight_nk = probs_nE.gather(-1, expert_nk)
        if self.config.norm_topk_prob:
            weight_nk = weight_nk / weight_nk.sum(-1, keepdim=True)
        counts_E = torch.bincount(expert_nk.flatten(), minlength=self.config.num_experts)
        routed = Routed(torch.stack([counts_E.to(torch.float32), probs_nE.sum(0)]), expert_nk, strayed)

        order = expert_nk.flatten().argsort(stable=True)
        y = self._experts(x_nD.index_select(0, order // self.config.top_k), counts_E, row_multiple)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        y_nkD = y.index_select(0, place).unflatten(0, expert_nk.shape)
        return _weighted_sum(y_nkD, weight_nk.to(x_nD.dtype)), routed

    def _experts(self, x: torch.Tensor, counts_E: torch.Tensor, row_multiple: int) -> torch.Tensor:
        """Rows sorted by expert in, the experts' outputs in the same order out."""
        mesh = self.mesh
        if mesh.ep_group is None and mesh.etp_group is None:
            return self._swiglu(x, counts_E, row_multiple)
        send, tables = self._exchange_counts(counts_E)
        receive = [sum(row) for row in tables[mesh.etp_rank]]
        by_source = [row for table in tables for row in table]  # [etp rank, source rank][local expert] rows
        sizes = [sum(map(sum, table)) for table in tables]
        grouping, back = _regroup(by_source, x.device)
        x = gather_uneven(exchange_rows(x, send, receive, mesh), sizes, mesh.etp_group)[grouping]
        y = self._swiglu(x, [sum(column) for column in zip(*by_source, strict=True)], row_multiple)
        y = reduce_scatter_uneven(y[back], sizes, mesh.etp_group)
        return exchange_rows(y, receive, send, mesh)

    def _exchange_counts(self, counts_E: torch.Tensor) -> tuple[list[int], list[list[list[int]]]]:
        """Rows to each EP rank; and [etp rank][source rank][local expert] rows that arrive there."""
        mesh, ranks = self.mesh, self.mesh.parallel.ep
        arriving = counts_E
        if mesh.ep_group is not None:
            arriving = torch.empty_like(counts_E)
            dist.all_to_all_single(arriving, counts_E, group=mesh.ep_group)
        gathered = arriving
        if mesh.etp_group is not None:
            gathered = arriving.new_empty(mesh.parallel.etp * arriving.numel())
            dist.all_gather_into_tensor(gathered, arriving, group=mesh.etp_group)
        both = torch.cat([counts_E, gathered]).view(1 + mesh.parallel.etp, ranks, -1).tolist()
        return [sum(row) for row in both[0]], both[1:]

    def _swiglu(self, x: torch.Tensor, counts: list[int] | torch.Tensor, row_multiple: int) -> torch.Tensor:
        counts = counts if isinstance(counts, list) else counts.tolist()
        gate, up = _grouped(x, self._gate_up, counts, row_multiple).chunk(2, dim=-1)
        return _grouped(F.silu(gate) * up, self._down, counts, row_multiple)


def _grouped(x: torch.Tensor, matrices: list[Matrix], counts: list[int], row_multiple: int) -> torch.Tensor:
    """`grouped_linear` over matrices that may be cut into blocks of rows, all of them alike."""
    if isinstance(matrices[0], nn.Parameter):
        return grouped_linear(x, matrices, counts, row_multiple)  # type: ignore[arg-type]
    blocks = zip(*(blocks_of(matrix) for matrix in matrices), strict=True)
    return torch.cat([grouped_linear(x, weights, counts, row_multiple) for weights in blocks], dim=-1)


def _regroup(by_source: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices that turn rows ordered (source, expert) into (expert, source), and back."""
    starts: list[list[int]] = []
    position = 0
    for row in by_source:
        starts.append([])
        for rows in row:
            starts[-1].append(position)
            position += rows
    pieces = [
        torch.arange(starts[source][expert], starts[source][expert] + by_source[source][expert])
        for expert in range(len(by_source[0]))
        for source in range(len(by_source))
    ]
    grouping = torch.cat(pieces)
    back = torch.empty_like(grouping)
    back[grouping] = torch.arange(grouping.numel())
    return grouping.to(device), back.to(device)


def _weighted_sum(y_nkD: torch.Tensor, weight_nk: torch.Tensor) -> torch.Tensor:
    out = y_nkD[:, 0] * weight_nk[:, :1]
    for k in range(1, y_nkD.shape[1]):
        out = out + y_nkD[:, k] * weight_nk[:, k : k + 1]
    return out


def load_balancing_loss(stats: list[torch.Tensor], total_counts_E: torch.Tensor, total_rows: int) -> torch.Tensor:
    """The auxiliary loss of Switch Transformers as transformers computes it for Qwen3-MoE, over all layers at once.

    E · Σ_e f_e P_e, with f_e the mean number of times a token went to expert e, and P_e its mean probability. Where
    routing is replayed f_e counts the replayed one, the load there really is, and P_e is this model's own, so the
    gradient still takes from the experts that are loaded. ``stats`` is one
    [2, E] a layer, of this rank's rows; ``total_counts_E`` (summed over layers) and ``total_rows`` (rows ×
    layers) are those of the whole batch, so that the sum of the ranks' and micro-batches' losses is the loss of the
    batch. Scalar, float32.
    """
    probs_E = torch.stack(stats)[:, 1].sum(0)
    return probs_E.numel() * (total_counts_E / total_rows * probs_E / total_rows).sum()
