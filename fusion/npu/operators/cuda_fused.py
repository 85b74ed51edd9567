"""Run Triton kernels beside PyTorch's own operators on CUDA cards, in generation.

    norm, sum · qkv · norms, rotated · KV stored · attention, splits joined · out · norm, sum
    router · experts chosen · counted, sorted · rows · product, SwiGLU, product · summed

Gradients and what is compared with them are computed as the table `cuda` does: only inference mode runs these kernels.
Attention reads pages of any multiple of 64 tokens, so that it needs no newer PyTorch than the products do."""

import torch
from torch import Tensor

from fusion.npu.operators import triton_attention, triton_experts
from fusion.npu.operators.cuda import Cuda
from fusion.npu.operators.gating import Gating
from fusion.npu.operators.limits import HALVES
from fusion.npu.operators.plain import Matrices, Permuted, Rope
from fusion.npu.operators.plain_attention import PagedRows


class CudaFused(Cuda):
    name = "cuda_fused"

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not torch.is_inference_mode_enabled():
            return super().add_rms_norm(x, residual, weight, eps)
        return triton_attention.add_rms_norm(x, residual, weight, eps)

    def norm_rope(
        self, qkv_NhC: Tensor, q_norm_C: Tensor | None, k_norm_C: Tensor | None, rope: Rope, kv_heads: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not torch.is_inference_mode_enabled():
            return super().norm_rope(qkv_NhC, q_norm_C, k_norm_C, rope, kv_heads, eps)
        q, k = triton_attention.norm_rope(qkv_NhC, q_norm_C, k_norm_C, *rope, kv_heads, eps)
        return q, k, qkv_NhC[:, -kv_heads:]

    def swiglu(self, gate_up_NI: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled():
            return super().swiglu(gate_up_NI)
        return triton_experts.swiglu(gate_up_NI)

    def gate(
        self, logits_NE: Tensor, gating: Gating, correction_E: Tensor | None, row_multiple: int = 1
    ) -> tuple[Tensor, Tensor]:
        if not (gating.plain and torch.is_inference_mode_enabled()):
            return super().gate(logits_NE, gating, correction_E, row_multiple)
        return triton_experts.gate(logits_NE, gating.top_k, normalise=gating.normalise)

    def permute(self, x_ND: Tensor, expert_Nk: Tensor, num_experts: int) -> Permuted:
        if not torch.is_inference_mode_enabled():
            return super().permute(x_ND, expert_Nk, num_experts)
        routed = triton_experts.route(expert_Nk, num_experts)
        self._counted = routed.counts, routed.ends
        return Permuted(triton_experts.gather(x_ND, routed.sources), routed.places, routed.counts)

    def unpermute(self, y: Tensor, order: Tensor, weight_Nk: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled():
            return super().unpermute(y, order, weight_Nk)
        return triton_experts.unroute(y, order, weight_Nk)

    def local_experts(
        self, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor, num_experts: int, local: range, matrices: Matrices
    ) -> Tensor:
        if not torch.is_inference_mode_enabled():
            return super().local_experts(x_ND, expert_Nk, weight_Nk, num_experts, local, matrices)
        sources, places, counts_E, ends_E = triton_experts.route(expert_Nk, num_experts, local.start)
        counts, ends = self._counted = counts_E[: len(local)], ends_E[: len(local)]
        y = self.experts(triton_experts.gather(x_ND, sources), counts, matrices)
        return triton_experts.unroute(y, places, weight_Nk, ends)

    def store_kv(
        self, pool: Tensor, slots: Tensor, k_NKC: Tensor, v_NKC: Tensor | None, repeated: Tensor | None
    ) -> None:
        if v_NKC is None:
            super().store_kv(pool, slots, k_NKC, v_NKC, repeated)
        else:
            triton_attention.store(pool, slots, k_NKC, v_NKC, repeated)

    def paged_attention(
        self, q_NHC: Tensor, pool: Tensor, rows: PagedRows, value_width: int | None, scale: float
    ) -> Tensor:
        if value_width is not None or q_NHC.dtype not in HALVES or pool.shape[2] % triton_attention.TOKENS:
            return super().paged_attention(q_NHC, pool, rows, value_width, scale)
        assert rows.blocks_RB is not None
        keys, values = pool.chunk(2)
        longest = max(rows.host_lengths)
        return triton_attention.attend(
            q_NHC, keys, values, rows.blocks_RB, rows.lengths, longest, scale, invariant=rows.invariant
        )
