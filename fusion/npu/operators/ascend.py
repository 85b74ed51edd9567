"""Run the operators of Ascend cards, `torch.ops.npu`.

    generation   norm · qkv · 2 norms · 2 rotations · copy of v · scatter · attention · out · sum and norm
                 router · gating · routing · product · SwiGLU · product · un-routing · sum           19 launches a layer
    of latents   norm · 3 projections · 2 norms · 2 rotations · scatter · absorb · attention · values · out · sum, norm

Every pass runs the same forward operator, with gradients and without. Where torch_npu derives no gradient,
`ascend_functions.py` names the operators of the backward pass. A call beyond a documented limit (`limits.py`) runs the
plain composition and says so, once; on the emulated card, whose models are tiny, it is reported and made all the same.
A pool of latents has all compressed channels before all rotated ones, as attention takes them as two tensors.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from fusion.npu.operators import limits
from fusion.npu.operators.ascend_functions import AddRMSNorm, GroupedLinear, Permute, routing_options
from fusion.npu.operators.gating import Gating
from fusion.npu.operators.plain import AdamW, AdamWStates, PagedRows, Permuted, Plain, Rope
from fusion.npu.operators.rows import sum_of_local

Weights = Sequence[torch.Tensor] | torch.Tensor
"""A matrix [O, D] of each expert, or all of them stacked [E, O, D]"""


class Ascend(Plain):
    """The table of Ascend cards and, for tests, of the emulated one, which has references of the same operators."""

    name = "ascend"
    needs_block_rows = fuses_chunks = stacks_experts = runs_ahead = True

    def __init__(self) -> None:
        self._is_emulated = "torch_npu" not in sys.modules
        if self._is_emulated:
            from fusion.npu.emulator.operators import register

            register()
        self._allowed: dict[tuple, bool] = {}
        self._reported: set[str] = set()
        self._masks: dict[torch.device, torch.Tensor] = {}

    def _takes(self, operator: Any, like: torch.Tensor, args: tuple, about: tuple = (), **kwargs: Any) -> bool:
        """Return whether an operator may be called with these arguments. Limits are checked once for every dtype and
        shape of a row of ``like``, and what else is ``about`` the call."""
        if not like.shape[0]:
            return False  # not every operator takes empty tensors
        key = operator, like.dtype, like.shape[1:], about
        allowed = self._allowed.get(key)
        if allowed is None:
            name = operator._schema.name.removeprefix("npu::")
            broken = limits.beyond(name, limits.arguments_of(operator, args, kwargs))
            allowed = self._allowed[key] = not broken or self._exceeds(name, broken)
        return allowed

    def _exceeds(self, name: str, broken: list[str]) -> bool:
        """Report a call beyond limits; return whether to make it nevertheless."""
        what = "made nevertheless on the emulated card" if self._is_emulated else "composed of PyTorch's operators"
        message = f"{name}: {'; '.join(broken)}: {what}"
        if message not in self._reported:
            self._reported.add(message)
            warnings.warn(message, stacklevel=4)
        return self._is_emulated

    # Norms and positions

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        operator = torch.ops.npu.npu_rms_norm.default
        if not self._takes(operator, x, (x, weight, eps)):
            return super().rms_norm(x, weight, eps)
        return operator(x, weight, eps)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._takes(torch.ops.npu.npu_add_rms_norm.default, x, (x, residual, weight, eps)):
            return super().add_rms_norm(x, residual, weight, eps)
        return AddRMSNorm.apply(x, residual, weight, eps)

    def norm_rope(
        self,
        qkv_NhC: torch.Tensor,
        q_norm_C: torch.Tensor | None,
        k_norm_C: torch.Tensor | None,
        rope: Rope,
        kv_heads: int,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = qkv_NhC.split([qkv_NhC.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if q_norm_C is not None and k_norm_C is not None:
            q, k = self.rms_norm(q, q_norm_C, eps), self.rms_norm(k, k_norm_C, eps)
        return self.rotate(q, rope), self.rotate(k, rope), v

    def rotate(self, x_NhR: torch.Tensor, rope: Rope, interleaved: bool = False) -> torch.Tensor:
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

    def swiglu(self, gate_up_NI: torch.Tensor) -> torch.Tensor:
        operator = torch.ops.npu.npu_swiglu.default
        if not self._takes(operator, gate_up_NI, (gate_up_NI, -1)):
            return super().swiglu(gate_up_NI)
        return operator(gate_up_NI, -1)

    def gate(
        self, logits_NE: torch.Tensor, gating: Gating, correction_E: torch.Tensor | None, row_multiple: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
            # The operator normalises sigmoids always and softmaxes never.
            if gating.normalise != (gating.scores == "sigmoid"):
                return super().gate(logits_NE, gating, correction_E, row_multiple)
        if not self._takes(operator, logits_NE, (logits_NE,), about=(gating,), **options):
            return super().gate(logits_NE, gating, correction_E, row_multiple)
        return operator(logits_NE, **options)[:2]

    def permute(self, x_ND: torch.Tensor, expert_Nk: torch.Tensor, num_experts: int) -> Permuted:
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

    def unpermute(self, y: torch.Tensor, order: torch.Tensor, weight_Nk: torch.Tensor) -> torch.Tensor:
        operator, weight_Nk = torch.ops.npu.npu_moe_token_unpermute.default, weight_Nk.to(y.dtype)
        if self._takes(operator, y, (y, order, weight_Nk), about=weight_Nk.shape[1:]):
            return operator(y, order, weight_Nk)
        return (y.index_select(0, order).unflatten(0, weight_Nk.shape) * weight_Nk.unsqueeze(-1)).sum(1)

    def local_experts(
        self,
        x_ND: torch.Tensor,
        expert_Nk: torch.Tensor,
        weight_Nk: torch.Tensor,
        num_experts: int,
        local: range,
        gate_up: Weights,
        down: Weights,
    ) -> torch.Tensor:
        operator, experts = torch.ops.npu.npu_moe_init_routing_v2.default, expert_Nk.to(torch.int32)
        options = routing_options(expert_Nk.numel(), num_experts, local)
        if not self._takes(operator, x_ND, (x_ND, experts), about=(num_experts, local), **options):
            return super().local_experts(x_ND, expert_Nk, weight_Nk, num_experts, local, gate_up, down)
        rows, places, counts_E, _ = operator(x_ND, experts, **options)
        y = self.experts(rows, counts_E, gate_up, down)
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
        self,
        x_nD: torch.Tensor,
        expert_nk: torch.Tensor,
        weight_nk: torch.Tensor,
        num_experts: int,
        group: ProcessGroup,
        max_rows: int,
        gate_up: Weights,
        down: Weights,
    ) -> torch.Tensor:
        experts, ranks, rank = expert_nk.to(torch.int32), group.size(), group.rank()
        name = group.group_name if self._is_emulated else communicator_name(group)
        domain, options = (name, ranks, rank, num_experts), dict(shared_expert_num=0, global_bs=max_rows * ranks)
        rows, _, assist, counts_E, received, received_over_tp, _ = torch.ops.npu.npu_moe_distribute_dispatch_v2(
            x_nD, experts, *domain, **options
        )
        y = self.experts(rows, counts_E, gate_up, down)
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

    def takes_counts(self, x: torch.Tensor, experts: int, row_multiple: int = 1) -> bool:
        return row_multiple == 1 and (self._is_emulated or 2 <= experts <= limits.MAX_GROUPS)

    def grouped_linear(
        self, x_ND: torch.Tensor, weights: Weights, counts: list[int] | torch.Tensor, row_multiple: int = 1
    ) -> torch.Tensor:
        if not x_ND.shape[0]:
            return super().grouped_linear(x_ND, list(weights), [0] * len(weights), row_multiple)
        listed = [weights] if isinstance(weights, torch.Tensor) else list(weights)  # a stack is the list's only entry
        if isinstance(counts, torch.Tensor) and row_multiple == 1:
            x, about = x_ND.contiguous(), (len(listed), listed[0].shape)
            options = dict(group_list=counts, split_item=3, group_type=0, group_list_type=1)
            if self._takes(torch.ops.npu.npu_grouped_matmul.default, x, ([x], listed), about=about, **options):
                return GroupedLinear.apply(x, counts, *listed)
        return super().grouped_linear(x_ND, list(weights), counts, row_multiple)

    # Attention

    def varlen_attention(
        self,
        q_NHC: torch.Tensor,
        k_MKC: torch.Tensor,
        v_MKV: torch.Tensor,
        lengths: list[int],
        scale: float | None = None,
        kv_lengths: list[int] | None = None,
    ) -> torch.Tensor:
        if kv_lengths is None and len(lengths) > limits.MAX_PACKED_SEQUENCES:
            return self._in_parts(q_NHC, k_MKC, v_MKV, lengths, scale)
        operator, width, channels = torch.ops.npu.npu_fusion_attention.default, v_MKV.shape[-1], q_NHC.shape[-1]
        v = v_MKV if width == channels else F.pad(v_MKV, (0, channels - width))
        ends = list(accumulate(lengths))
        args = q_NHC, k_MKC, v, q_NHC.shape[1], "TND"
        options = dict(
            atten_mask=self._mask(q_NHC.device),
            scale=channels**-0.5 if scale is None else scale,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends if kv_lengths is None else list(accumulate(kv_lengths)),
            sparse_mode=3,  # causal, by the lower right triangle of each sequence
        )
        takes = self._takes(operator, q_NHC, args, about=(k_MKC.shape[1], len(ends)), **options)
        if width > channels or not takes:
            return super().varlen_attention(q_NHC, k_MKC, v_MKV, lengths, scale, kv_lengths)
        out = operator(*args, **options)[0]
        return out if width == channels else out[..., :width]

    def _in_parts(
        self, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKV: torch.Tensor, lengths: list[int], scale: float | None
    ) -> torch.Tensor:
        """Attend to as many sequences at a time as the operator takes: a pass over fewer then runs the same one."""
        step = limits.MAX_PACKED_SEQUENCES
        some = [lengths[start : start + step] for start in range(0, len(lengths), step)]
        rows = [sum(part) for part in some]
        parts = zip(q_NHC.split(rows), k_NKC.split(rows), v_NKV.split(rows), some, strict=True)
        return torch.cat([self.varlen_attention(*part, scale) for part in parts])

    def _mask(self, device: torch.device) -> torch.Tensor:
        """Return the mask that the operator stretches over causal attention of any length."""
        if device not in self._masks:
            with torch.inference_mode(False):  # a trainer may save it for its backward pass
                self._masks[device] = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
        return self._masks[device]

    def areas(self, pool: torch.Tensor, value_width: int | None) -> tuple[torch.Tensor, ...]:
        if value_width is None:
            return (pool,)
        blocks, heads, block_size, width = pool.shape
        widths = value_width, width - value_width
        flat = pool.view(-1).split([blocks * heads * block_size * part for part in widths])
        return tuple(x.view(blocks, heads, block_size, part) for x, part in zip(flat, widths, strict=True))

    def store_kv(
        self,
        pool: torch.Tensor,
        slots: torch.Tensor,
        k_NKC: torch.Tensor,
        v_NKC: torch.Tensor | None,
        repeated: torch.Tensor | None,
    ) -> None:
        assert v_NKC is not None
        # A head's block is a block of one head: the operator's format has heads behind the tokens of a block.
        keys, values = pool.view(-1, pool.shape[2], 1, pool.shape[3]).chunk(2)
        self._store([k_NKC, v_NKC], [keys, values], slots, repeated)

    def store_latents(
        self,
        pool: torch.Tensor,
        slots: torch.Tensor,
        compressed_NR: torch.Tensor,
        rotated_NP: torch.Tensor,
        repeated: torch.Tensor | None,
    ) -> None:
        caches = [area.transpose(1, 2) for area in self.areas(pool, compressed_NR.shape[-1])]
        self._store([compressed_NR, rotated_NP], caches, slots, repeated)

    def _store(
        self,
        parts: list[torch.Tensor],
        caches: list[torch.Tensor],
        slots: torch.Tensor,
        repeated: torch.Tensor | None,
    ) -> None:
        """Write rows to the same slots of both caches [blocks, block_size, 1, C]. Of the slots, which name those of
        keys first, the others are ignored."""
        if repeated is not None:
            parts = [torch.cat([x, x.index_select(0, repeated)]) for x in parts]
        operator = torch.ops.npu.npu_scatter_pa_kv_cache.default
        rows = [x.contiguous().view(-1, 1, x.shape[-1]) for x in parts]
        args = *rows, *caches, slots[: len(rows[0])]
        if self._takes(operator, rows[0], args, about=(caches[0].dtype,), cache_mode="Norm"):
            operator(*args, cache_mode="Norm")
            return
        for x, cache in zip(rows, caches, strict=True):
            cache.view(-1, 1, x.shape[-1]).index_copy_(0, args[-1], x)

    def reads_blocks(self, dtype: torch.dtype) -> bool:
        return True

    def paged_attention(
        self, q_NHC: torch.Tensor, pool: torch.Tensor, rows: PagedRows, value_width: int | None, scale: float
    ) -> torch.Tensor:
        if value_width is not None:
            return super().paged_attention(q_NHC, pool, rows, value_width, scale)
        # One query a sequence, [R, H, 1, C]: of this layout alone do all sources say that lengths are each row's own.
        args = q_NHC.contiguous().unsqueeze(2), *pool.chunk(2)
        out = self._infer(args, rows, "BNSD", kv_heads=pool.shape[1], block_size=pool.shape[2], scale=scale)
        return super().paged_attention(q_NHC, pool, rows, None, scale) if out is None else out.squeeze(2)

    def paged_latent_attention(
        self, q_NHR: torch.Tensor, q_NHP: torch.Tensor, pool: torch.Tensor, rows: PagedRows, scale: float
    ) -> torch.Tensor:
        compressed, rotated = (area.squeeze(1) for area in self.areas(pool, q_NHR.shape[-1]))
        args = q_NHR.contiguous().unsqueeze(1), compressed, compressed
        rope = dict(query_rope=q_NHP.contiguous().unsqueeze(1), key_rope=rotated)
        # Heads first in the result, as the product that makes values of it takes them.
        out = self._infer(args, rows, "BSND_NBSD", kv_heads=1, block_size=pool.shape[2], scale=scale, **rope)
        if out is None:
            return super().paged_latent_attention(q_NHR, q_NHP, pool, rows, scale)
        return out.squeeze(2).transpose(0, 1)

    def _infer(
        self,
        args: tuple[torch.Tensor, ...],
        rows: PagedRows,
        layout: str,
        *,
        kv_heads: int,
        block_size: int,
        scale: float,
        **rope: torch.Tensor,
    ) -> torch.Tensor | None:
        """Attend with one query of each row to its blocks; None where that is beyond a limit."""
        operator, heads = torch.ops.npu.npu_fused_infer_attention_score.default, args[0].numel() // len(args[0])
        options: dict[str, Any] = dict(
            actual_seq_lengths_kv=rows.host_lengths,
            block_table=rows.blocks_RB,
            num_heads=heads // args[0].shape[-1],
            num_key_value_heads=kv_heads,
            scale=scale,
            input_layout=layout,
            block_size=block_size,
            **rope,
        )
        if not self._takes(operator, args[0], args, about=(layout, kv_heads, block_size), **options):
            return None
        return operator(*args, **options)[0]

    def head_linear(self, x_NHC: torch.Tensor, weight_HCO: torch.Tensor, row_multiple: int = 1) -> torch.Tensor:
        operator, by_head = torch.ops.npu.npu_transpose_batchmatmul.default, x_NHC.transpose(0, 1)
        turned = not by_head.is_contiguous()
        args = (x_NHC if turned else by_head), weight_HCO
        options = dict(perm_x1=[1, 0, 2] if turned else [0, 1, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
        about = turned, weight_HCO.shape
        if row_multiple > 1 or not self._takes(operator, x_NHC, args, about=about, **options):
            return super().head_linear(x_NHC, weight_HCO, row_multiple)
        return operator(*args, **options)

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


def _plain_sines(sin_N1R: torch.Tensor, interleaved: bool) -> torch.Tensor:
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
