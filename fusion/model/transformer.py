"""Define Qwen3 and Qwen3-MoE once, for training and inference, in any layout.

Between blocks the rows of a packed batch are split over TP. A block gathers them, computes its heads or its columns,
and reduce-scatters the sum; the MoE computes on the split rows and exchanges them over EP.

    ids_N ─ embed ─► x_[N/tp]D ─► { norm ─ gather ─ qkv ─ rope ─ attend ─ out ─ scatter ─(+)
                                    norm ─ MLP or MoE ─(+) } × layers ─► norm ─ gather ─► hidden_ND

A pipeline stage holds consecutive layers: x enters it as ``hidden`` and leaves it before the norm, both split over TP.
A trainer and an engine differ only in ``attend``: the trainer attends within packed sequences, the engine writes to and
reads from its paged KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusion.model.bucket_plan import plan_units, unit_bytes
from fusion.model.collectives import gather_rows, reduce_scatter_rows, shard_sizes
from fusion.model.config import ModelConfig
from fusion.model.matrix import Weights, blocks_of, parameter, project
from fusion.model.mesh import Mesh
from fusion.model.moe import MoE
from fusion.model.replay import Forced, Replay, Routed
from fusion.model.table import local_params
from fusion.model.weights import Buckets
from fusion.npu import Device
from fusion.npu.ops import BATCH_INVARIANT_ROWS, linear, norm_rope, rms_norm, swiglu, varlen_causal_attention

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, counted from the first of this rank's stage, q_NHC, k_NKC, v_NKC) → out_NHC; position encoding and q/k norm
are already applied."""


class PackedAttention:
    """Implements `Attend` for whole packed sequences of the given lengths: causal, no cache, no padding."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen_causal_attention(q, k, v, lengths=self.lengths)


class Transformer(nn.Module):
    """Computes one rank's shard of the model. Its parameters are views into `weights` (flat `Buckets`), initially zero.

    Args:
        dtype: of the weights and of the arithmetic; norms and the router's softmax run in float32, as in transformers.
        bucket_bytes: determines the size of the largest unit of storage (`unit_bytes`).
        batch_invariant: make a row's result bitwise independent of the other rows in its batch.
        share: weights of another model on this card; units that both hold are stored once, in ``share``.
        resident: False: hold no memory for the weights after construction.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        device: Device,
        dtype: torch.dtype = torch.float32,
        *,
        bucket_bytes: int = 256 << 20,
        batch_invariant: bool = False,
        share: Buckets | None = None,
        resident: bool = True,
    ):
        super().__init__()
        self.config, self.mesh, self.device = config, mesh, device
        self.row_multiple = BATCH_INVARIANT_ROWS if batch_invariant else 1
        self.recompute = False
        self.bucket_bytes, self.max_numel = bucket_bytes, unit_bytes(bucket_bytes) // dtype.itemsize
        self.table = local_params(config, mesh.parallel, mesh.rank, max_numel=self.max_numel)
        plans = plan_units(self.table, dtype.itemsize, unit_bytes(bucket_bytes))
        self.weights = Buckets(plans, device, dtype, owner="weights", share=share, resident=resident)
        views = self.weights.views
        self.layers = nn.ModuleDict(
            {str(i): Layer(config, mesh, n, weights=_below(f"layers.{i}.", views))
             for n, i in enumerate(mesh.parallel.layers(config.num_layers, mesh.pp_rank))}
        )  # fmt: skip
        tied = config.tie_embeddings and not config.num_labels
        if mesh.first_stage or (mesh.last_stage and tied):
            self.embed = parameter("embed", views)
        if mesh.last_stage:
            self.norm = nn.Parameter(views["norm"])
            if config.num_labels:
                self.score = nn.Parameter(views["score"])
            else:
                self.lm_head = self.embed if tied else parameter("lm_head", views)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
        self.inv_freq = (1.0 / config.rope_theta**exponents).to(device.torch_device)

    def forward(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        attend: Attend,
        routed: list[Routed] | None = None,
        hidden: torch.Tensor | None = None,
        replay: Replay | None = None,
    ) -> torch.Tensor:
        """Compute the hidden states [N, D] after the final norm.

        All ranks of an EP group must call it equally often; N may be 0.

        Args:
            ids_N, positions_N: int64 [N], the same on all TP ranks.
            routed: one `Routed` of this rank's rows is appended per MoE layer.
            hidden: what the previous pipeline stage returned; None on the first stage.
            replay: the experts to route the rows to.

        Returns:
            On the last stage, [N, D] after the norm; on the others, this TP rank's rows [n, D] before it
            (`hidden_rows`).
        """
        rows = ids_N.shape[0]
        rope = self._rope(positions_N)
        assert (hidden is None) == self.mesh.first_stage, "hidden states come from the stage before, ids from the batch"
        x = self._embed(ids_N) if hidden is None else hidden
        replay = None if replay is None else replay.of_rank(self.mesh)
        for index, layer in enumerate(self.layers.values()):
            forced = None if replay is None else replay.layer(index)
            inputs: dict[str, Any] = dict(
                rows=rows,
                rope=rope,
                attend=attend,
                row_multiple=self.row_multiple,
                forced=forced,
                record=routed is not None,
            )
            if self.recompute and torch.is_grad_enabled():
                x, layer_routed = checkpoint(layer, x, use_reentrant=False, early_stop=False, **inputs)
            else:
                x, layer_routed = layer(x, **inputs)
            if routed is not None and layer_routed is not None:
                routed.append(layer_routed)
        if not self.mesh.last_stage:
            return x
        return gather_rows(rms_norm(x, self.norm, self.config.rms_norm_eps), rows, self.mesh)

    def hidden_rows(self, rows: int) -> int:
        """Return how many rows of a batch of ``rows`` this TP rank holds between two blocks and between two stages."""
        return shard_sizes(rows, self.mesh.parallel.tp)[self.mesh.tp_rank]

    def logits(self, hidden_nD: torch.Tensor) -> torch.Tensor:
        """Compute this TP rank's columns of the logits, [n, V / tp], from hidden states [n, D]. On the last stage."""
        return project(hidden_nD, self.lm_head, self.row_multiple)

    def scores(self, hidden_nD: torch.Tensor) -> torch.Tensor:
        """Compute a reward model's scores [n, labels] from hidden states [n, D], on all TP ranks. On the last stage."""
        return linear(hidden_nD, self.score, self.row_multiple)

    def _embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        blocks = blocks_of(self.embed)
        if self.mesh.tp_group is None and len(blocks) == 1:
            return F.embedding(ids_N, blocks[0])
        first = self.mesh.tp_rank * sum(block.shape[0] for block in blocks)
        partial = None
        for block in blocks:
            local = ids_N - first
            is_local = (local >= 0) & (local < block.shape[0])
            looked_up = F.embedding(local.where(is_local, 0), block) * is_local.unsqueeze(-1)
            partial = looked_up if partial is None else partial + looked_up
            first += block.shape[0]
        assert partial is not None
        return reduce_scatter_rows(partial, self.mesh)

    def _rope(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [N, 1, C]; the sines of the first half with the sign of the rotation."""
        angles = positions_N.to(torch.float32)[:, None] * self.inv_freq
        cos, sin, dtype = angles.cos(), angles.sin(), self.weights.dtype
        cos_NC, sin_NC = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return cos_NC.to(dtype).unsqueeze(1), sin_NC.to(dtype).unsqueeze(1)


class Layer(nn.Module):
    """Computes attention and the MLP or MoE. ``index`` counts from the first layer of this rank's stage."""

    def __init__(self, config: ModelConfig, mesh: Mesh, index: int, weights: Weights):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_norm = nn.Parameter(weights["input_norm"])
        self.attention = Attention(config, mesh, index, weights=_below("attention.", weights))
        self.post_norm = nn.Parameter(weights["post_norm"])
        if config.num_experts:
            self.moe = MoE(config, mesh, _below("moe.", weights))
        else:
            self.mlp = MLP(mesh, _below("mlp.", weights))

    def forward(
        self,
        x: torch.Tensor,
        rows: int,
        rope: Any,
        attend: Attend,
        row_multiple: int,
        forced: Forced | None = None,
        record: bool = True,
    ) -> tuple[torch.Tensor, Routed | None]:
        x = x + self.attention(
            rms_norm(x, self.input_norm, self.eps), rows, rope, attend=attend, row_multiple=row_multiple
        )
        normed = rms_norm(x, self.post_norm, self.eps)
        if hasattr(self, "moe"):
            y, routed = self.moe(normed, row_multiple, forced, record=record)
            return x + y, routed
        return x + self.mlp(normed, rows, row_multiple), None


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, mesh: Mesh, index: int, weights: Weights):
        super().__init__()
        self.mesh, self.index, self.eps = mesh, index, config.rms_norm_eps
        self.heads = config.num_heads // mesh.parallel.tp
        self.kv_heads = max(1, config.num_kv_heads // mesh.parallel.tp)
        self.head_dim = config.head_dim
        self.qkv = parameter("qkv", weights)
        self.q_norm = nn.Parameter(weights["q_norm"])
        self.k_norm = nn.Parameter(weights["k_norm"])
        self.out = parameter("out", weights)

    def forward(self, x: torch.Tensor, rows: int, rope: Any, attend: Attend, row_multiple: int) -> torch.Tensor:
        x_ND = gather_rows(x, rows, self.mesh)
        qkv = project(x_ND, self.qkv, row_multiple).unflatten(-1, (-1, self.head_dim))
        q, k, v = norm_rope(qkv, self.q_norm, self.k_norm, rope, self.kv_heads, self.eps)
        attended = attend(self.index, q, k, v).flatten(1)
        return reduce_scatter_rows(project(attended, self.out, row_multiple), self.mesh)


class MLP(nn.Module):
    def __init__(self, mesh: Mesh, weights: Weights):
        super().__init__()
        self.mesh = mesh
        self.gate_up = parameter("gate_up", weights)
        self.down = parameter("down", weights)

    def forward(self, x: torch.Tensor, rows: int, row_multiple: int) -> torch.Tensor:
        gate_up = project(gather_rows(x, rows, self.mesh), self.gate_up, row_multiple)
        return reduce_scatter_rows(project(swiglu(gate_up), self.down, row_multiple), self.mesh)


def _below(prefix: str, weights: Weights) -> Weights:
    return {name[len(prefix) :]: view for name, view in weights.items() if name.startswith(prefix)}
