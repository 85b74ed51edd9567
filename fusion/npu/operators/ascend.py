"""Run the operators of Ascend cards, `torch.ops.npu`.

    generation   norm · qkv · 2 norms · 2 rotations · copy of v · scatter · attention · out · sum and norm
                 router · gating · routing · product · SwiGLU · product · un-routing · sum           19 launches a layer
    of latents   norm · 3 projections · 2 norms · 2 rotations · scatter · absorb · attention · values · out · sum, norm

Every pass runs the same forward operator, with gradients and without. Where torch_npu derives no gradient,
`ascend_functions.py` names the operators of the backward pass. Attention, and what holds calls to documented limits, is
inherited from `ascend_attention.py`."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusion.npu.operators import limits
from fusion.npu.operators.ascend_attention import AscendAttention
from fusion.npu.operators.ascend_functions import AddRMSNorm, Permute, product_options, products, routing_options
from fusion.npu.operators.gating import Gating
from fusion.npu.operators.plain import AdamW, AdamWStates, Counts, Matrices, Permuted, Rope, Weights
from fusion.npu.operators.rows import GroupedLinear, sum_of_local


class Ascend(AscendAttention):
    """The table of Ascend cards and, for tests, of the emulated one, which has references of the same operators."""

    name = "ascend"
    stacks_experts = runs_ahead = True

    # Norms and positions

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        operator = torch.ops.npu.npu_rms_norm.default
        if not self._takes(operator, x, (x, weight, eps)):
            return super().rms_norm(x, weight, eps)
        return operator(x, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not self._takes(torch.ops.npu.npu_add_rms_norm.default, x, (x, residual, weight, eps)):
            return super().add_rms_norm(x, residual, weight, eps)
        return AddRMSNorm.apply(x, residual, weight, eps)

    def norm_rope(
        self, qkv_NhC: Tensor, q_norm_C: Tensor | None, k_norm_C: Tensor | None, rope: Rope, kv_heads: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv_NhC.split([qkv_NhC.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if q_norm_C is not None and k_norm_C is not None:
            q, k = self.rms_norm(q, q_norm_C, eps), self.rms_norm(k, k_norm_C, eps)
        return self.rotate(q, rope), self.rotate(k, rope), v

    def rotate(self, x_NhR: Tensor, rope: Rope, interleaved: bool = False) -> Tensor:
        operator, mode = torch.ops.npu.npu_rotary_mul.default, "interleave" if interleaved else "half"
        width, channels = rope[0].shape[-1], x_NhR.shape[-1]
        x, passed = (x_NhR, None) if width == channels else x_NhR.split([width, channels - width], dim=-1)
        factors = rope[0].unsqueeze(0), _plain_sines(rope[1], interleaved).unsqueeze(0)
        args = x.unsqueeze(0), *factors, mode  # [1, S, N, D]: the tokens as one sequence
        if not self._takes(operator, x, args):
            return super().rotate(x_NhR, rope, interleaved)
        rotated = operator(*args).squeeze(0)
        return rotated if passed is None else torch.cat([rotated, passed], dim=-1)

    # MLP and experts

    def swiglu(self, gate_up_NI: Tensor) -> Tensor:
        operator = torch.ops.npu.npu_swiglu.default
        if not self._takes(operator, gate_up_NI, (gate_up_NI, -1)):
            return super().swiglu(gate_up_NI)
        return operator(gate_up_NI, -1)

    def gate(
        self, logits_NE: Tensor, gating: Gating, correction_E: Tensor | None, row_multiple: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return weights in the dtype of the logits, from arithmetic in float32, and experts as int32: what the
        operators return, and what `unpermute` and `permute` take."""
        options: dict[str, Any] = dict(k=gating.top_k)
        if correction_E is not None:  # in the dtype of the logits: it decides in float32
            logits_NE, correction_E = logits_NE.to(torch.float32), correction_E.to(torch.float32)
        if gating.plain:
            operator = torch.ops.npu.npu_moe_gating_top_k_softmax_v2.default
            options |= dict(renorm=int(gating.normalise))
        else:
            operator = torch.ops.npu.npu_moe_gating_top_k.default
            options |= dict(
                bias=correction_E,
                k_group=gating.top_groups,
                group_count=gating.groups,
                group_select_mode=int(gating.group_scores == "sum_of_two"),
                norm_type=int(gating.scores == "sigmoid"),
                routed_scaling_factor=gating.scale,
            )
            if gating.normalise != (gating.scores == "sigmoid"):
                self._report("npu_moe_gating_top_k: normalises sigmoids always, softmaxes never: composed of PyTorch's")
                return super().gate(logits_NE, gating, correction_E, row_multiple)
        if not self._takes(operator, logits_NE, (logits_NE,), about=(gating,), **options):
            return super().gate(logits_NE, gating, correction_E, row_multiple)
        return operator(logits_NE, **options)[:2]

    def permute(self, x_ND: Tensor, expert_Nk: Tensor, num_experts: int) -> Permuted:
        """Sort the rows by their experts. ``order`` is int32 [N * k]: the place among the rows of each cell of [N, k],
        as `unpermute` takes it."""
        experts = expert_Nk.to(torch.int32)
        operator = torch.ops.npu.npu_moe_init_routing_v2.default
        options = routing_options(expert_Nk.numel(), num_experts)
        if not self._takes(operator, x_ND, (x_ND, experts), about=(num_experts,), **options):
            rows, order, counts_E = super().permute(x_ND, expert_Nk.to(torch.int64), num_experts)
            places = torch.empty_like(order, dtype=torch.int32)
            places.index_copy_(0, order, torch.arange(len(order), dtype=torch.int32, device=order.device))
            return Permuted(rows, places, counts_E)
        return Permuted(*Permute.apply(x_ND, experts, num_experts))

    def unpermute(self, y: Tensor, order: Tensor, weight_Nk: Tensor) -> Tensor:
        operator, weight_Nk = torch.ops.npu.npu_moe_token_unpermute.default, weight_Nk.to(y.dtype)
        if self._takes(operator, y, (y, order, weight_Nk), about=weight_Nk.shape[1:]):
            return operator(y, order, weight_Nk)
        return (y.index_select(0, order).unflatten(0, weight_Nk.shape) * weight_Nk.unsqueeze(-1)).sum(1)

    def local_experts(
        self, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor, num_experts: int, local: range, matrices: Matrices
    ) -> Tensor:
        operator, experts = torch.ops.npu.npu_moe_init_routing_v2.default, expert_Nk.to(torch.int32)
        options = routing_options(expert_Nk.numel(), num_experts, local)
        if not self._takes(operator, x_ND, (x_ND, experts), about=(num_experts, local), **options):
            return super().local_experts(x_ND, expert_Nk, weight_Nk, num_experts, local, matrices)
        rows, places, counts_E, _ = operator(x_ND, experts, **options)
        y = self.experts(rows, counts_E, matrices)
        y_NkD = y.index_select(0, places.clamp(min=0)).unflatten(0, weight_Nk.shape)
        return sum_of_local(y_NkD, places.view(weight_Nk.shape) >= 0, weight_Nk)  # the places of others are -1

    def max_dispatched_rows(self, ranks: int, num_experts: int, top_k: int, *, hidden: int, dtype: torch.dtype) -> int:
        x, experts = torch.empty(1, hidden, dtype=dtype, device="meta"), torch.empty(1, top_k, device="meta")
        named = dict(x=x, expert_ids=experts.to(torch.int32), ep_world_size=ranks, moe_expert_num=num_experts)
        if not self._is_emulated and not is_a3():  # others want more arguments, and have narrower limits
            return 0
        broken = limits.beyond("npu_moe_distribute_dispatch_v2", named)
        if broken and not self._exceeds("npu_moe_distribute_dispatch_v2", broken):
            return 0
        return min(limits.MAX_DISPATCHED_ROWS, limits.rows_of_buffer(ranks, num_experts // ranks, top_k, hidden))

    def dispatched_experts(
        self, x_nD: Tensor, expert_nk: Tensor, weight_nk: Tensor, group: ProcessGroup, max_rows: int, matrices: Matrices
    ) -> Tensor:
        experts, ranks = expert_nk.to(torch.int32), group.size()
        name = group.group_name if self._is_emulated else communicator_name(group)
        domain = name, ranks, group.rank(), ranks * len(matrices[0])
        options = dict(shared_expert_num=0, global_bs=max_rows * ranks)
        rows, _, assist, counts_E, received, received_over_tp, _ = torch.ops.npu.npu_moe_distribute_dispatch_v2(
            x_nD, experts, *domain, **options
        )
        y = self.experts(rows, counts_E, matrices)
        return torch.ops.npu.npu_moe_distribute_combine_v2(
            y,
            experts,
            assist,
            received,
            weight_nk.to(torch.float32),
            *domain,
            tp_send_counts=received_over_tp,
            **options,
        )

    def takes_counts(self, x: Tensor, experts: int, row_multiple: int = 1) -> bool:
        return row_multiple == 1

    def grouped_linear(self, x_ND: Tensor, weights: Weights, counts: Counts, row_multiple: int = 1) -> Tensor:
        if isinstance(counts, Tensor) and isinstance(weights, Tensor) and row_multiple == 1:
            x, operator, options = x_ND.contiguous(), torch.ops.npu.npu_grouped_matmul.default, product_options(counts)
            if self._takes(operator, x, ([x], [weights]), about=(weights.shape,), **options):
                return GroupedLinear.apply(x, weights, counts, products)
        counts = counts if x_ND.shape[0] else [0] * len(weights)
        return super().grouped_linear(x_ND, weights, counts, row_multiple)

    # Optimizer

    def adamw(self, states: AdamWStates, update: AdamW) -> None:
        step, lr, betas, weight_decay, eps = update
        scalars = betas[0] ** step, betas[1] ** step, lr, weight_decay, *betas, eps
        for var, grad, m, v in zip(*states, strict=True):
            torch.ops.npu.npu_apply_adam_w.out(*scalars, grad, None, False, False, var=var, m=m, v=v)


def is_a3() -> bool:
    """Return whether this process's card is an Atlas A3 (Ascend 910C)."""
    return "Ascend910_93" in torch.npu.get_device_name()  # type: ignore[attr-defined]


def communicator_name(group: ProcessGroup) -> str:
    """Return the name by which operators find HCCL's communicator of a group, which is created if needed."""
    backend: Any = group._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(group.rank())


def _plain_sines(sin_N1R: Tensor, interleaved: bool) -> Tensor:
    """Return the sines without the sign of the rotation. They are kept with the tensor: layers share it."""
    plain = getattr(sin_N1R, "plain_sines", None)
    if plain is None:
        if interleaved:
            plain = sin_N1R[..., 1::2].repeat_interleave(2, dim=-1)
        else:
            second = sin_N1R.chunk(2, dim=-1)[1]
            plain = torch.cat([second, second], dim=-1)
        sin_N1R.plain_sines = plain  # type: ignore[attr-defined]
    return plain
