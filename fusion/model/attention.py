"""Compute attention with this rank's heads: projections, norms and rotation. What attends is passed in.

    GroupedQuery   x ─ gather ─ qkv ─ norm, rotate ─► q_NHC, k_NKC, v_NKC ─ attend ─ out ─ scatter ─►
    Latent         x ─┬─ q_a ─ norm ─ gather ─ q_b ─ rotate ─► q ─────────┐
                      └─ kv_a ─ norm ─ gather ─ rotate ─► latent ─────────┴─ attend.latent ─ out ─ scatter ─►

Latents (multi-head latent attention, MLA) are computed by every rank from its own rows and gathered, which is less to
compute and to send than hidden states are. So the low-rank projections and their norms, which every TP rank holds
whole, get partial gradients, as other norms do (`fusion.training.shards`)."""

from typing import Any, Protocol

import torch
from torch import nn

from fusion.model.collectives import RowSplit, gather_rows, reduce_scatter_rows, sum_over_tp
from fusion.model.matrix import Adapted, Matrix, Weights, blocks_of, parameter, project, rows_of
from fusion.model.mesh import Mesh
from fusion.model.shared_rows import Reads, SharedRows
from fusion.model.spec import GroupedQuery, Latent
from fusion.npu.operators import Plain, linear

Pair = tuple[torch.Tensor, torch.Tensor]
"""Channels without position encoding, and those that are rotated"""


class Up:
    """Expand latents to this rank's heads by `kv_b_proj`, or move its two halves to queries and outputs (DeepSeek-V2,
    arXiv 2405.04434, section 2.1.2).

    With W_uk and W_uv the halves of a head, q · (W_uk c) = (W_ukᵀ q) · c, and Σ p (W_uv c) = W_uv Σ p c: either expand
    the latents c, or attend to them with absorbed queries and turn the attended latents into values. ``softmax_scale``:
    the factor of the scores."""

    def __init__(self, kv_b: Matrix, spec: Latent, operators: Plain, row_multiple: int = 1):
        self.kv_b, self.spec, self.operators, self.row_multiple = kv_b, spec, operators, row_multiple
        self.softmax_scale = spec.softmax_scale

    def expand(self, compressed_NR: torch.Tensor, rotated_NP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys [N, H, C] and values [N, H, V] of latents, the rotated key that all heads share last."""
        spec = self.spec
        expanded = project(compressed_NR, self.kv_b, self.row_multiple)
        nope, values = expanded.unflatten(-1, (-1, spec.nope_dim + spec.value_dim)).split(
            [spec.nope_dim, spec.value_dim], dim=-1
        )
        return torch.cat([nope, rotated_NP.unsqueeze(1).expand(-1, nope.shape[1], -1)], dim=-1), values

    def absorb(self, nope_NHC: torch.Tensor) -> torch.Tensor:
        """Return queries [N, H, R] whose products with compressed latents are those of nope_NHC with expanded keys."""
        nope = self.spec.nope_dim
        absorbed = self._multiply(nope_NHC, [matrices_HXR[:, :nope] for matrices_HXR in self._by_head(self.kv_b)])
        if (added := self._adapters()) is None:
            return absorbed
        (of_heads,) = self._by_head(added.lora_b)
        return absorbed + self._multiply(nope_NHC, [of_heads[:, :nope]]) @ added.lora_a * added.scale

    def values(self, out_NHR: torch.Tensor) -> torch.Tensor:
        """Return the values [N, H, V] of attended compressed latents [N, H, R]."""
        nope = self.spec.nope_dim
        values = [matrices_HXR[:, nope:].transpose(1, 2) for matrices_HXR in self._by_head(self.kv_b)]
        if (added := self._adapters()) is None:
            return self._multiply(out_NHR, values)
        (of_heads,) = self._by_head(added.lora_b)
        inner = linear(out_NHR.flatten(0, 1), added.lora_a, self.row_multiple).unflatten(0, out_NHR.shape[:2])
        low_rank = self._multiply(inner * added.scale, [of_heads[:, nope:].transpose(1, 2)])
        return self._multiply(out_NHR, values) + low_rank

    def of_heads(self, heads: range) -> "Up":
        """Return what expands to some of this rank's heads."""
        channels = self.spec.nope_dim + self.spec.value_dim
        rows = rows_of(self.kv_b, range(heads.start * channels, heads.stop * channels))
        return Up(rows, self.spec, self.operators, self.row_multiple)

    def _adapters(self) -> Adapted | None:
        return self.kv_b if isinstance(self.kv_b, Adapted) and self.kv_b.scale else None

    def _by_head(self, matrix: Matrix) -> list[torch.Tensor]:
        channels = self.spec.nope_dim + self.spec.value_dim
        return [block.unflatten(0, (-1, channels)) for block in blocks_of(matrix)]

    def _multiply(self, x_NHC: torch.Tensor, blocks: list[torch.Tensor]) -> torch.Tensor:
        if len(blocks) == 1:
            return self.operators.head_linear(x_NHC, blocks[0], self.row_multiple)
        heads = x_NHC.split([len(block) for block in blocks], dim=1)
        outs = [self.operators.head_linear(*head, self.row_multiple) for head in zip(heads, blocks, strict=True)]
        return torch.cat(outs, dim=1)


class Attend(Protocol):
    """What attends: within packed sequences, or to a paged KV cache. ``layer`` counts from the first of this rank's
    stage; position encoding and norms are already applied; N counts the rows of all TP ranks."""

    def __call__(self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor) -> torch.Tensor:
        """Return the output [N, H, C] of grouped-query attention with this rank's heads."""
        ...

    def latent(self, layer: int, q: Pair, latent: Pair, up: Up) -> torch.Tensor:
        """Return the output [N, H, V] of latent attention with this rank's heads. ``q``: [N, H, C] and [N, H, P].
        ``latent``: the normalised compressed keys and values [N, R], and the rotated key [N, P] that all heads share;
        the same on all TP ranks. ``up``: of this layer, for this rank's heads."""
        ...


class PackedAttention:
    """Implement `Attend` for whole packed sequences of the given lengths: causal, no cache, no padding."""

    def __init__(self, lengths: list[int], operators: Plain):
        self.lengths, self.operators = lengths, operators

    def __call__(self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor) -> torch.Tensor:
        return self.operators.varlen_attention(q_NHC, k_NKC, v_NKC, self.lengths)

    def latent(self, layer: int, q: Pair, latent: Pair, up: Up) -> torch.Tensor:
        k_NHC, v_NHV = up.expand(*latent)
        return self.operators.varlen_attention(torch.cat(q, dim=-1), k_NHC, v_NHV, self.lengths, up.softmax_scale)


class SharedPrefixAttention:
    """Implement `Attend` for packed sequences that share the rows of their prefixes: q, k and v are of the computed
    rows, and every sequence's own rows attend to the whole sequence."""

    def __init__(self, rows: SharedRows, operators: Plain, device: torch.device | str):
        self.operators = operators
        own = [length - common for length, common in zip(rows.lengths, rows.shared, strict=True)]
        self.lengths = [count for count in own if count]
        self.kv_lengths = [length for length, count in zip(rows.lengths, own, strict=True) if count]
        attends_N = torch.tensor(own).bool().repeat_interleave(torch.tensor(rows.lengths))
        self._read = Reads(rows.row_N[attends_N], device)

    def __call__(self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor) -> torch.Tensor:
        return self._attend(q_NHC, k_NKC, v_NKC, None)

    def latent(self, layer: int, q: Pair, latent: Pair, up: Up) -> torch.Tensor:
        return self._attend(torch.cat(q, dim=-1), *up.expand(*latent), up.softmax_scale)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        return self.operators.varlen_attention(q, self._read(k), self._read(v), self.lengths, scale, self.kv_lengths)


class Attention(nn.Module):
    """Compute grouped-query attention with this rank's heads."""

    def __init__(self, spec: GroupedQuery, mesh: Mesh, operators: Plain, *, index: int, eps: float, weights: Weights):
        super().__init__()
        self.spec, self.mesh, self.operators, self.index, self.eps = spec, mesh, operators, index, eps
        self.heads = spec.num_heads // mesh.parallel.tp
        self.kv_heads = max(1, spec.num_kv_heads // mesh.parallel.tp)
        self.head_dim = spec.head_dim
        self.qkv = parameter("qkv", weights)
        self.qkv_bias = nn.Parameter(weights["qkv_bias"]) if spec.qkv_bias else None
        self.q_norm = nn.Parameter(weights["q_norm"]) if spec.qk_norm != "none" else None
        self.k_norm = nn.Parameter(weights["k_norm"]) if spec.qk_norm != "none" else None
        self.out = parameter("out", weights)
        self.out_bias = nn.Parameter(weights["out_bias"]) if spec.out_bias else None
        self._norms_projection = spec.qk_norm == "projection"

    def forward(self, x: torch.Tensor, rows: RowSplit, rope: Any, attend: Attend, row_multiple: int) -> torch.Tensor:
        x_ND = gather_rows(x, rows, self.mesh)
        flat_qkv = project(x_ND, self.qkv, row_multiple)
        if self.qkv_bias is not None:
            flat_qkv = flat_qkv + self.qkv_bias
        if self._norms_projection:
            flat_qkv = self._norm_projection(flat_qkv)
        qkv = flat_qkv.unflatten(-1, (-1, self.head_dim))
        q_norm, k_norm = (None, None) if self._norms_projection else (self.q_norm, self.k_norm)
        q, k, v = self.operators.norm_rope(qkv, q_norm, k_norm, rope, self.kv_heads, self.eps)
        attended = attend(self.index, q, k, v).flatten(1)
        y = reduce_scatter_rows(project(attended, self.out, row_multiple), rows, self.mesh)
        return y if self.out_bias is None else y + self.out_bias

    def _norm_projection(self, qkv: torch.Tensor) -> torch.Tensor:
        """Normalise all query heads, and all key heads, of all TP ranks by their root mean squares, in float32."""
        widths = [self.heads * self.head_dim, self.kv_heads * self.head_dim]
        q, k, v = qkv.split([*widths, widths[1]], dim=-1)
        tp, q32, k32 = self.mesh.parallel.tp, q.to(torch.float32), k.to(torch.float32)
        # of equally many channels on each rank; ranks that share a key head count its squares once each
        means = torch.stack([q32.square().mean(-1) / tp, k32.square().mean(-1) / tp], dim=-1)
        scale_N2 = torch.rsqrt(sum_over_tp(means, self.mesh) + self.eps)
        assert self.q_norm is not None and self.k_norm is not None
        q = self.q_norm * (q32 * scale_N2[:, :1]).to(qkv.dtype)
        k = self.k_norm * (k32 * scale_N2[:, 1:]).to(qkv.dtype)
        return torch.cat([q, k, v], dim=-1)


class LatentAttention(nn.Module):
    """Compute multi-head latent attention with this rank's heads."""

    def __init__(self, spec: Latent, mesh: Mesh, operators: Plain, *, index: int, weights: Weights):
        super().__init__()
        self.spec, self.mesh, self.operators, self.index = spec, mesh, operators, index
        self._is_low_rank = spec.q_rank is not None
        if self._is_low_rank:
            self.q_a = parameter("q_a", weights)
            self.q_a_norm = nn.Parameter(weights["q_a_norm"])
            self.q_b = parameter("q_b", weights)
        else:
            self.q = parameter("q", weights)
        self.kv_a = parameter("kv_a", weights)
        self.kv_a_norm = nn.Parameter(weights["kv_a_norm"])
        self.kv_b = parameter("kv_b", weights)
        self.out = parameter("out", weights)

    def forward(self, x: torch.Tensor, rows: RowSplit, rope: Any, attend: Attend, row_multiple: int) -> torch.Tensor:
        spec = self.spec
        compressed, key = project(x, self.kv_a, row_multiple).split([spec.kv_rank, spec.rope_dim], dim=-1)
        compressed = self.operators.rms_norm(compressed, self.kv_a_norm, spec.norm_eps)
        source = x  # of the queries
        if self._is_low_rank:
            source = self.operators.rms_norm(project(x, self.q_a, row_multiple), self.q_a_norm, spec.norm_eps)
        source, compressed, key = self._gather(source, compressed, key, rows=rows)
        latent = compressed, self._rotate(key.unsqueeze(1), rope).squeeze(1)

        flat_q = project(source, self.q_b if self._is_low_rank else self.q, row_multiple)
        nope, rotated = flat_q.unflatten(-1, (-1, spec.head_dim)).split([spec.nope_dim, spec.rope_dim], dim=-1)
        up = Up(self.kv_b, spec, self.operators, row_multiple)
        attended = attend.latent(self.index, (nope, self._rotate(rotated, rope)), latent, up).flatten(1)
        return reduce_scatter_rows(project(attended, self.out, row_multiple), rows, self.mesh)

    def _rotate(self, x_NhP: torch.Tensor, rope: Any) -> torch.Tensor:
        return self.operators.rotate(x_NhP, rope, self.spec.rotary.interleaved)

    def _gather(self, *tensors: torch.Tensor, rows: RowSplit) -> tuple[torch.Tensor, ...]:
        """Gather the rows of all TP ranks, of all tensors at once."""
        if self.mesh.tp_group is None or rows.whole:
            return tensors
        widths = [tensor.shape[-1] for tensor in tensors]
        return gather_rows(torch.cat(tensors, dim=-1), rows, self.mesh).split(widths, dim=-1)
