"""Attend, and write and read the KV pool, by the operators of Ascend cards: that half of the table `Ascend`.

Calls are held to documented limits (`limits.py`). One beyond a limit runs the plain composition and says so, once; on
the emulated card, whose models are tiny, it is reported and made all the same. A pool of latents has all compressed
channels before all rotated ones, as attention takes them as two tensors."""

import sys
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fusion.npu.operators import limits
from fusion.npu.operators.plain import Plain
from fusion.npu.operators.plain_attention import Lengths, PagedRows


class AscendAttention(Plain):
    """The attention of the table `Ascend`, which inherits it."""

    needs_block_rows = fuses_chunks = True
    lengths_argument = "actual_seq_lengths_kv"

    def __init__(self) -> None:
        super().__init__()
        self._is_emulated = "torch_npu" not in sys.modules
        if self._is_emulated:
            from fusion.npu.emulator.operators import register

            register()
        self._allowed: dict[tuple, bool] = {}
        self._masks: dict[torch.device, Tensor] = {}

    def _takes(self, operator: Any, like: Tensor, args: tuple, about: tuple = (), **kwargs: Any) -> bool:
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
        self._report(f"{name}: {'; '.join(broken)}: {what}")
        return self._is_emulated

    def _attend_packed(
        self, q_NHC: Tensor, k_MKC: Tensor, v_MKV: Tensor, lengths: list[int], scale: float | None, kv_lengths: Lengths
    ) -> Tensor:
        if len(lengths) > limits.MAX_PACKED_SEQUENCES:
            return self._in_parts(q_NHC, k_MKC, v_MKV, lengths, scale, kv_lengths)
        operator, channels = torch.ops.npu.npu_fusion_attention.default, q_NHC.shape[-1]
        ends = list(accumulate(lengths))
        args = q_NHC, k_MKC, v_MKV, q_NHC.shape[1], "TND"
        options = dict(
            atten_mask=self._mask(q_NHC.device),
            scale=channels**-0.5 if scale is None else scale,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends if kv_lengths is None else list(accumulate(kv_lengths)),
            sparse_mode=3,  # causal, by the lower right triangle of each sequence
        )
        is_wide, about = v_MKV.shape[-1] > channels, (k_MKC.shape[1], len(ends))
        if is_wide or not self._takes(operator, q_NHC, args, about=about, **options):
            return super()._attend_packed(q_NHC, k_MKC, v_MKV, lengths, scale, kv_lengths)
        return operator(*args, **options)[0]

    def _in_parts(
        self, q_NHC: Tensor, k_MKC: Tensor, v_MKV: Tensor, lengths: list[int], scale: float | None, kv_lengths: Lengths
    ) -> Tensor:
        """Attend to as many sequences at a time as the operator takes: a pass over fewer then runs the same one."""
        step = limits.MAX_PACKED_SEQUENCES
        queries, keys = (
            [each[start : start + step] for start in range(0, len(each), step)]
            for each in (lengths, kv_lengths or lengths)
        )
        rows, kv_rows = ([sum(part) for part in parts] for parts in (queries, keys))
        tensors = zip(q_NHC.split(rows), k_MKC.split(kv_rows), v_MKV.split(kv_rows), strict=True)
        return torch.cat(
            [
                self._attend_packed(*part, some, scale, None if kv_lengths is None else of_keys)
                for part, some, of_keys in zip(tensors, queries, keys, strict=True)
            ]
        )

    def _mask(self, device: torch.device) -> Tensor:
        """Return the mask that the operator stretches over causal attention of any length."""
        if device not in self._masks:
            with torch.inference_mode(False):  # a trainer may save it for its backward pass
                self._masks[device] = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
        return self._masks[device]

    def areas(self, pool: Tensor, value_width: int | None) -> tuple[Tensor, ...]:
        if value_width is None:
            return (pool,)
        blocks, heads, block_size, width = pool.shape
        widths = value_width, width - value_width
        flat = pool.view(-1).split([blocks * heads * block_size * part for part in widths])
        return tuple(x.view(blocks, heads, block_size, part) for x, part in zip(flat, widths, strict=True))

    def store_kv(
        self, pool: Tensor, slots: Tensor, k_NKC: Tensor, v_NKC: Tensor | None, repeated: Tensor | None
    ) -> None:
        assert v_NKC is not None
        # A head's block is a block of one head: the operator's format has heads behind the tokens of a block.
        keys, values = pool.view(-1, pool.shape[2], 1, pool.shape[3]).chunk(2)
        self._store([k_NKC, v_NKC], [keys, values], slots, repeated)

    def store_latents(
        self, pool: Tensor, slots: Tensor, compressed_NR: Tensor, rotated_NP: Tensor, repeated: Tensor | None
    ) -> None:
        caches = [area.transpose(1, 2) for area in self.areas(pool, compressed_NR.shape[-1])]
        self._store([compressed_NR, rotated_NP], caches, slots, repeated)

    def _store(self, parts: list[Tensor], caches: list[Tensor], slots: Tensor, repeated: Tensor | None) -> None:
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
        self, q_NHC: Tensor, pool: Tensor, rows: PagedRows, value_width: int | None, scale: float
    ) -> Tensor:
        if value_width is not None:
            return super().paged_attention(q_NHC, pool, rows, value_width, scale)
        # One query a sequence, [R, H, 1, C]: of this layout alone do all sources say that lengths are each row's own.
        args = q_NHC.contiguous().unsqueeze(2), *pool.chunk(2)
        out = self._infer(args, pool, rows, "BNSD", scale=scale)
        return super().paged_attention(q_NHC, pool, rows, None, scale) if out is None else out[0].squeeze(2)

    def paged_latent_attention(
        self, q_NHR: Tensor, q_NHP: Tensor, pool: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        compressed, rotated = (area.squeeze(1) for area in self.areas(pool, q_NHR.shape[-1]))
        args = q_NHR.contiguous().unsqueeze(1), compressed, compressed
        rope = dict(query_rope=q_NHP.contiguous().unsqueeze(1), key_rope=rotated)
        # Heads first in the result, as the product that makes values of it takes them.
        out = self._infer(args, pool, rows, "BSND_NBSD", scale=scale, **rope)
        if out is None:
            return super().paged_latent_attention(q_NHR, q_NHP, pool, rows, scale)
        return out[0].squeeze(2).transpose(0, 1)

    def partial_attention(
        self, q_NHC: Tensor, pool: Tensor, rows: PagedRows, value_width: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = dict(scale=scale, softmax_lse_flag=True)
        if value_width is None:
            args, layout, heads_at = (q_NHC.contiguous().unsqueeze(2), *pool.chunk(2)), "BNSD", 2
        else:
            compressed, rotated = (area.squeeze(1) for area in self.areas(pool, value_width))
            q_NHR, q_NHP = (q.contiguous().unsqueeze(1) for q in q_NHC.tensor_split([value_width], dim=-1))
            args, layout, heads_at = (q_NHR, compressed, compressed), "BSND", 1
            options |= dict(query_rope=q_NHP, key_rope=rotated)
        out = self._infer(args, pool, rows, layout, **options)
        if out is None:
            return super().partial_attention(q_NHC, pool, rows, value_width, scale)
        return out[0].squeeze(heads_at), out[1].flatten(1)  # the latter [R, H, 1, 1] in every layout

    def _infer(
        self, args: tuple[Tensor, ...], pool: Tensor, rows: PagedRows, layout: str, *, scale: float, **others: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Attend with one query of each row to its blocks; None where that is beyond a limit. Return the log-sum-exp
        of the scores, too, if asked for."""
        operator, heads = torch.ops.npu.npu_fused_infer_attention_score.default, args[0].numel() // len(args[0])
        _, kv_heads, block_size, _ = pool.shape
        options: dict[str, Any] = dict(
            actual_seq_lengths_kv=rows.host_lengths,
            block_table=rows.blocks_RB,
            num_heads=heads // args[0].shape[-1],
            num_key_value_heads=kv_heads,
            scale=scale,
            input_layout=layout,
            block_size=block_size,
            **others,
        )
        if not self._takes(operator, args[0], args, about=(layout, kv_heads, block_size), **options):
            return None
        return operator(*args, **options)

    def head_linear(self, x_NHC: Tensor, weight_HCO: Tensor, row_multiple: int = 1) -> Tensor:
        operator, by_head = torch.ops.npu.npu_transpose_batchmatmul.default, x_NHC.transpose(0, 1)
        turned = not by_head.is_contiguous()
        args = (x_NHC if turned else by_head), weight_HCO
        options = dict(perm_x1=[1, 0, 2] if turned else [0, 1, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
        about = turned, weight_HCO.shape
        if row_multiple > 1 or not self._takes(operator, x_NHC, args, about=about, **options):
            return super().head_linear(x_NHC, weight_HCO, row_multiple)
        return operator(*args, **options)
