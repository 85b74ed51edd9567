"""Run PyTorch's own fused operators on CUDA cards: RMSNorm, grouped products of stacks, varlen attention, AdamW.

    generation   norm · qkv · norms, joined, rotated · KV joined, stored · attention · out · sum, norm
                 router · top k, softmax · counts, order, rows · ends, product, SwiGLU, product · un-routing · sum

A call beyond a limit (`limits.py`; float32 above all, which only the norm takes) runs the plain composition, and says
so once. Attention reads the KV pool by pages of 256 tokens: every head of keys is a sequence of its own, as a head's
block is one contiguous matrix, so a page is a block of one head. Blocks of latents, whose channels are too many for the
kernel, are gathered and attended to by `scaled_dot_product_attention`."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils import deterministic

from fusion.npu.operators import limits
from fusion.npu.operators.gating import Gating
from fusion.npu.operators.plain import AdamW, AdamWStates, Counts, Plain, Rope, Weights
from fusion.npu.operators.plain_attention import Lengths, PagedRows
from fusion.npu.operators.rows import GroupedLinear

TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether this torch wants to be told of grouped queries; else it sees them by the numbers of heads"""
KEPT_ENDS = 16
"""Number of lists of lengths whose ends are kept on the card: those of the packed prompts and long chunks of a step"""


class Cuda(Plain):
    name = "cuda"
    needs_block_rows = fuses_chunks = stacks_experts = runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self._allowed: dict[tuple, bool] = {}
        self._pages: tuple[PagedRows, _Pages] | None = None
        self._counted: tuple[Tensor, Tensor] | None = None
        self._ends: deque[tuple[list[int], Tensor]] = deque(maxlen=KEPT_ENDS)

    def _takes(self, operator: str, about: tuple, *calls: Mapping[str, Any]) -> bool:
        """Return whether an operator may be called with these arguments. Limits are checked once for what the ``calls``
        are ``about``."""
        key = operator, about
        allowed = self._allowed.get(key)
        if allowed is None:
            broken = [problem for arguments in calls for problem in limits.beyond(operator, arguments)]
            if broken:
                self._report(f"{operator}: {'; '.join(broken)}: composed of other operators")
            allowed = self._allowed[key] = not broken
        return allowed

    # Norms

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def norm_rope(
        self, qkv_NhC: Tensor, q_norm_C: Tensor | None, k_norm_C: Tensor | None, rope: Rope, kv_heads: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q_norm_C is None or k_norm_C is None:
            return super().norm_rope(qkv_NhC, q_norm_C, k_norm_C, rope, kv_heads, eps)
        heads = qkv_NhC.shape[1] - 2 * kv_heads
        q, k, v = qkv_NhC.split([heads, kv_heads, kv_heads], dim=1)
        qk = torch.cat([self.rms_norm(q, q_norm_C, eps), self.rms_norm(k, k_norm_C, eps)], dim=1)
        q, k = self.rotate(qk, rope).split([heads, kv_heads], dim=1)
        return q, k, v

    def rotate(self, x_NhR: Tensor, rope: Rope, interleaved: bool = False) -> Tensor:
        if interleaved:
            return super().rotate(x_NhR, rope, interleaved)
        width = rope[0].shape[-1]
        if width == x_NhR.shape[-1]:
            return _Rotate.apply(x_NhR, *rope)
        rotated, passed = x_NhR.split([width, x_NhR.shape[-1] - width], dim=-1)
        return torch.cat([_Rotate.apply(rotated, *rope), passed], dim=-1)

    # Experts

    def gate(
        self, logits_NE: Tensor, gating: Gating, correction_E: Tensor | None, row_multiple: int = 1
    ) -> tuple[Tensor, Tensor]:
        if not (gating.plain and gating.normalise):
            return super().gate(logits_NE, gating, correction_E, row_multiple)
        top_Nk, expert_Nk = logits_NE.topk(gating.top_k, dim=-1)
        return top_Nk.softmax(-1, dtype=torch.float32), expert_Nk  # as of all experts, divided by the sum of these

    def unpermute(self, y: Tensor, order: Tensor, weight_Nk: Tensor) -> Tensor:
        y_NkD = torch.empty_like(y).index_copy_(0, order, y).unflatten(0, weight_Nk.shape)
        return torch.bmm(weight_Nk.to(y.dtype).unsqueeze(1), y_NkD).squeeze(1)

    def takes_counts(self, x: Tensor, experts: int, row_multiple: int = 1) -> bool:
        about = x.dtype, x.shape[1:]
        return row_multiple == 1 and self._takes("grouped_mm", about, {"mat_a": x, "mat_b": x})

    def grouped_linear(self, x_ND: Tensor, weights: Weights, counts: Counts, row_multiple: int = 1) -> Tensor:
        on_card = isinstance(counts, Tensor) and row_multiple == 1 and x_ND.shape[0] > 0
        if on_card and isinstance(weights, Tensor) and self._multiplies(x_ND, weights):
            assert isinstance(counts, Tensor)
            return GroupedLinear.apply(x_ND.contiguous(), weights, self._ends_of_rows(counts), _products)
        return super().grouped_linear(x_ND, weights, counts, row_multiple)

    def _ends_of_rows(self, counts_E: Tensor) -> Tensor:
        """Return the place behind the last row of each expert, int32 [E]; kept for the products that follow."""
        if self._counted is None or self._counted[0] is not counts_E:
            self._counted = counts_E, counts_E.cumsum(0, dtype=torch.int32)
        return self._counted[1]

    def _multiplies(self, x_ND: Tensor, stack_EOD: Tensor) -> bool:
        """Return whether the grouped product takes x and a stack, and their gradients."""
        about = x_ND.dtype, stack_EOD.shape, stack_EOD.stride()
        forward = {"mat_a": x_ND, "mat_b": stack_EOD.transpose(1, 2)}
        backward = {"mat_a": x_ND.new_empty(1, stack_EOD.shape[1]), "mat_b": stack_EOD}
        return self._takes("grouped_mm", about, forward, backward)

    # Attention

    def _attend_packed(
        self, q_NHC: Tensor, k_MKC: Tensor, v_MKV: Tensor, lengths: list[int], scale: float | None, kv_lengths: Lengths
    ) -> Tensor:
        channels, call = q_NHC.shape[-1], {"query": q_NHC, "block_table": None}
        if v_MKV.shape[-1] > channels or not self._takes("varlen_attn", (q_NHC.dtype, channels), call):
            return super()._attend_packed(q_NHC, k_MKC, v_MKV, lengths, scale, kv_lengths)
        kv_lengths = kv_lengths or lengths
        grouped = q_NHC.shape[1] != k_MKC.shape[1]
        options: dict[str, Any] = {"enable_gqa": grouped} if TAKES_GROUPS else {}
        out = varlen_attn(
            q_NHC,
            k_MKC,
            v_MKV,
            self._ends_of(lengths, q_NHC.device),
            self._ends_of(kv_lengths, q_NHC.device),
            max(lengths),
            max(kv_lengths),
            scale=scale,
            window_size=(-1, 0),  # causal, by the lower right corner of each sequence
            **options,
        )
        assert isinstance(out, Tensor)
        _repeat_gradients(out)
        return out

    def _ends_of(self, lengths: list[int], device: torch.device) -> Tensor:
        """Return 0 and the end of each sequence, int32, on the card; kept for the layers of one pass."""
        for kept, ends in self._ends:
            if kept is lengths:
                return ends
        with torch.inference_mode(False):  # a trainer may save it for its backward pass
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            ends = ends.to(device, non_blocking=True)
        self._ends.append((lengths, ends))
        return ends

    def reads_blocks(self, dtype: torch.dtype) -> bool:
        return True

    def paged_attention(
        self, q_NHC: Tensor, pool: Tensor, rows: PagedRows, value_width: int | None, scale: float
    ) -> Tensor:
        if value_width is not None:
            self._report("varlen_attn: takes no latents: composed of other operators")
            return super().paged_attention(q_NHC, pool, rows, value_width, scale)
        kv_heads, page, channels = pool.shape[1:]
        about = q_NHC.dtype, channels, page
        pages = self._pages_of(rows, kv_heads)
        keys, values = pool.view(-1, page, 1, channels).chunk(2)
        call = {"query": q_NHC, "key": keys, "block_table": pages.table}
        if not self._takes("varlen_attn", about, call):
            return super().paged_attention(q_NHC, pool, rows, value_width, scale)
        out = varlen_attn(
            q_NHC.reshape(q_NHC.shape[0] * kv_heads, -1, channels),
            keys,
            values,
            pages.starts,
            None,
            1,
            max(rows.host_lengths),
            scale=scale,
            enable_gqa=q_NHC.shape[1] != kv_heads,
            seqused_k=pages.lengths,
            block_table=pages.table,
            num_splits=1 if rows.invariant else None,
        )
        assert isinstance(out, Tensor)
        return out.view(q_NHC.shape)

    def partial_attention(
        self, q_NHC: Tensor, pool: Tensor, rows: PagedRows, value_width: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        self._report("varlen_attn: not used where ranks share KV: composed of other operators")
        return super().partial_attention(q_NHC, pool, rows, value_width, scale)

    def _pages_of(self, rows: PagedRows, kv_heads: int) -> _Pages:
        """Return the rows as sequences of one head each; kept for the layers of one pass."""
        if self._pages is None or self._pages[0].table is not rows.table:
            assert rows.blocks_RB is not None
            heads = torch.arange(kv_heads, dtype=torch.int32, device=rows.table.device)
            table = rows.blocks_RB.unsqueeze(1) * kv_heads + heads.unsqueeze(1)
            starts = torch.arange(table.shape[0] * kv_heads + 1, dtype=torch.int32, device=heads.device)
            lengths = rows.lengths.to(torch.int32).repeat_interleave(kv_heads)
            self._pages = rows, _Pages(table.flatten(0, 1), starts, lengths)
        return self._pages[1]

    # Optimizer

    def adamw(self, states: AdamWStates, update: AdamW) -> None:
        steps = torch.full((len(states.params),), float(update.step), device=states.params[0].device)
        update.by_torch(states, list(steps.unbind()), fused=True)


def _repeat_gradients(out: Tensor) -> None:
    """Let the backward pass of attention add the gradients of queries in one order, which PyTorch's kernel does where
    deterministic algorithms are asked for (attention_backward.cu): without their launches that fill new tensors."""
    if out.grad_fn is None or torch.are_deterministic_algorithms_enabled():
        return

    def ask(asked: bool) -> None:
        deterministic.fill_uninitialized_memory = not asked  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(asked)

    out.grad_fn.register_prehook(lambda grads: ask(True))
    out.grad_fn.register_hook(lambda grads, _: ask(False))


class _Pages(NamedTuple):
    """R * K sequences of one query each: ``table`` int32 [R * K, B], ``starts`` int32 [R * K + 1] of the queries,
    ``lengths`` int32 [R * K] of the keys."""

    table: Tensor
    starts: Tensor
    lengths: Tensor


class _Rotate(torch.autograd.Function):
    """Rotate the halves of heads. The gradient turns back: the sines of a pair have opposite signs."""

    @staticmethod
    def forward(ctx: Any, x_NhR: Tensor, cos_N1R: Tensor, sin_N1R: Tensor):
        ctx.save_for_backward(cos_N1R, sin_N1R)
        first, second = x_NhR.chunk(2, dim=-1)
        return torch.addcmul(x_NhR * cos_N1R, torch.cat([second, first], dim=-1), sin_N1R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        cos_N1R, sin_N1R = ctx.saved_tensors
        first, second = grads[0].chunk(2, dim=-1)
        turned = torch.cat([second, first], dim=-1)
        return torch.addcmul(grads[0] * cos_N1R, turned, sin_N1R, value=-1), None, None


def _products(x: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    return F.grouped_mm(x, weight, offs=ends_E)
