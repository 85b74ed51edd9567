"""The sparse MLP: route, send tokens to their experts, grouped SwiGLU, send them back.

    x_nD ─ router ─► top-k ─ sort by expert ─ all-to-all ─► group by local expert ─ grouped matmul ─┐
                          out_nD ◄─ Σ weight · y ◄─ back in order ◄─ all-to-all ◄────────────────────┘

Every rank brings its own rows (rows are split over TP between blocks), so no token is computed twice. Sums over the k
experts of a token run in the router's order, never in order of arrival.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fusion.model.collectives import exchange_rows
from fusion.model.config import ModelConfig
from fusion.model.parallel import Mesh
from fusion.npu.ops import grouped_linear, linear


class MoE(nn.Module):
    def __init__(self, config: ModelConfig, mesh: Mesh, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.config, self.mesh = config, mesh
        self.router = nn.Parameter(weights["router"])
        self.gate_up = nn.Parameter(weights["gate_up"])
        self.down = nn.Parameter(weights["down"])

    def forward(self, x_nD: torch.Tensor, row_multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output [n, D] and the router's statistics [2, E]: tokens and summed probabilities."""
        probs_nE = linear(x_nD, self.router, row_multiple).softmax(-1, dtype=torch.float32)
        weight_nk, expert_nk = probs_nE.topk(self.config.top_k, dim=-1)
        if self.config.norm_topk_prob:
            weight_nk = weight_nk / weight_nk.sum(-1, keepdim=True)
        counts_E = torch.bincount(expert_nk.flatten(), minlength=self.config.num_experts)
        stats = torch.stack([counts_E.to(torch.float32), probs_nE.sum(0)])

        order = expert_nk.flatten().argsort(stable=True)
        y = self._experts(x_nD.index_select(0, order // self.config.top_k), counts_E, row_multiple)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        y_nkD = y.index_select(0, place).unflatten(0, expert_nk.shape)
        return _weighted_sum(y_nkD, weight_nk.to(x_nD.dtype)), stats

    def _experts(self, x: torch.Tensor, counts_E: torch.Tensor, row_multiple: int) -> torch.Tensor:
        """Rows sorted by expert in, the experts' outputs in the same order out."""
        if self.mesh.ep_group is None:
            return self._swiglu(x, counts_E, row_multiple)
        ranks = self.mesh.parallel.ep
        arriving = torch.empty_like(counts_E)
        dist.all_to_all_single(arriving, counts_E, group=self.mesh.ep_group)
        both = torch.stack([counts_E, arriving]).view(2, ranks, -1).tolist()
        send, receive = ([sum(row) for row in table] for table in both)
        by_source: list[list[int]] = both[1]  # [source rank][local expert] rows
        grouping, back = _regroup(by_source, x.device)
        x = exchange_rows(x, send, receive, self.mesh)[grouping]
        y = self._swiglu(x, [sum(column) for column in zip(*by_source, strict=True)], row_multiple)
        return exchange_rows(y[back], receive, send, self.mesh)

    def _swiglu(self, x: torch.Tensor, counts: list[int] | torch.Tensor, row_multiple: int) -> torch.Tensor:
        gate, up = grouped_linear(x, self.gate_up, counts, row_multiple).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.down, counts, row_multiple)


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

    E · Σ_e f_e P_e, with f_e the mean number of times a token chose expert e, and P_e its mean probability. ``stats``
    is one [2, E] a layer, of this rank's rows; ``total_counts_E`` (summed over layers) and ``total_rows`` (rows ×
    layers) are those of the whole batch, so that the sum of the ranks' and micro-batches' losses is the loss of the
    batch. Scalar, float32.
    """
    probs_E = torch.stack(stats)[:, 1].sum(0)
    return probs_E.numel() * (total_counts_E / total_rows * probs_E / total_rows).sum()
