"""State what the operators of attention and of the KV cache compute (`references.py` says how)."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return x in at least float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write rows [n, heads, width] to slots of caches [blocks, block size, heads, width]."""
    assert cache_mode in (None, "Norm"), "only the format ND is emulated"
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.flatten(0, 1).index_copy_(0, slot_mapping.long(), rows)


def _by_head(x_TND: Tensor, heads: int) -> Tensor:
    """Return [heads, T, D] of [T, N, D]; each of the N is repeated for the query heads that share it."""
    return wide(x_TND).repeat_interleave(heads // x_TND.shape[1], dim=1).transpose(0, 1)


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_lengths_kv: Sequence[int],
    block_table: Tensor,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend with one query of each sequence to the first tokens of its blocks.

    BNSD: queries [B, N, 1, D], keys and values [blocks, K, block size, D], result [B, N, 1, D].
    BSND_NBSD, of latents: [B, 1, N, D], [blocks, block size, D], result [N, B, 1, D]; D and the channels of the two
    ``rope`` are a query's and a key's. BSND: as this, result [B, 1, N, D].
    The log-sum-exp of the scores, if asked for: [B, N, 1, 1]."""
    of_latents = input_layout in ("BSND", "BSND_NBSD")
    if of_latents:
        assert query_rope is not None and key_rope is not None
        queries = torch.cat([query, query_rope], dim=-1).squeeze(1)
        keys, value = [key.unsqueeze(1), key_rope.unsqueeze(1)], value.unsqueeze(1)
    else:
        assert input_layout == "BNSD" and query_rope is None
        queries, keys = query.squeeze(2), [key]
    assert queries.shape[1] == num_heads and value.shape[1:3] == (num_key_value_heads, block_size)
    out = query.new_zeros(*queries.shape[:2], value.shape[-1])
    lse = wide(query).new_zeros(*queries.shape[:2], 1, 1) if softmax_lse_flag else query.new_empty(0).float()
    for row, length in enumerate(actual_seq_lengths_kv):
        if length and query.device.type != "meta":
            blocks = block_table[row, : -(-length // block_size)]
            *k, v = (x.index_select(0, blocks).transpose(1, 2).flatten(0, 1)[:length] for x in (*keys, value))
            k_by_head = _by_head(torch.cat(k, dim=-1), num_heads)
            scores = _by_head(queries[row].unsqueeze(0), num_heads) @ k_by_head.transpose(1, 2) * scale
            out[row] = (scores.softmax(-1) @ _by_head(v, num_heads)).squeeze(1)
            if softmax_lse_flag:
                lse[row] = scores.logsumexp(-1, keepdim=True)
    if input_layout == "BSND":
        return out.unsqueeze(1), lse
    return (out.transpose(0, 1).contiguous() if of_latents else out).unsqueeze(2), lse


def _sequences(ends: Sequence[int], kv_ends: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    starts, kv_starts = [0, *ends[:-1]], [0, *kv_ends[:-1]]
    for start, end, kv_start, kv_end in zip(starts, ends, kv_starts, kv_ends, strict=True):
        if end > start:
            yield slice(start, end), slice(kv_start, kv_end)


def _scores(query: Tensor, key: Tensor, heads: int, scale: float) -> Tensor:
    """Return [heads, T, S], of each query with the keys up to its own; the last query's is the last."""
    scores = _by_head(query, heads) @ _by_head(key, heads).transpose(1, 2) * scale
    allowed = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril(len(key) - len(query))
    return scores.masked_fill(~allowed, -torch.inf)


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: None,
    padding_mask: None,
    atten_mask: Tensor,
    scale: float,
    keep_prob: float,
    pre_tockens: int,
    next_tockens: int,
    inner_precise: int,
    prefix: None,
    actual_seq_qlen: Sequence[int],
    actual_seq_kvlen: Sequence[int],
    sparse_mode: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Attend causally, by the lower right corner, within packed sequences, whose cumulative lengths are given. Returns
    the output [T, N, D], the maxima and the sums of the softmax [T, N, 8], and what only dropout uses."""
    assert input_layout == "TND" and query.shape[1] == head_num and atten_mask.shape == (2048, 2048)
    assert sparse_mode == 3 and keep_prob == 1.0
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    top, total = (query.new_empty(*query.shape[:2], 8, dtype=torch.float32) for _ in range(2))
    for rows, read in _sequences(actual_seq_qlen, actual_seq_kvlen):
        scores = _scores(query[rows], key[read], head_num, scale)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        sums = weights.sum(-1, keepdim=True)
        out[rows] = (weights / sums @ _by_head(value[read], head_num)).transpose(0, 1).to(out.dtype)
        top[rows], total[rows] = largest.transpose(0, 1).float(), sums.transpose(0, 1).float()
    return out, top, total, query.new_empty(0), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float = 1.0,
    actual_seq_qlen: Sequence[int],
    actual_seq_kvlen: Sequence[int],
    sparse_mode: int = 0,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key and value from what `fusion_attention` returned."""
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for rows, read in _sequences(actual_seq_qlen, actual_seq_kvlen):
        q, k, v = query[rows], key[read], value[read]
        scores = _scores(q, k, head_num, scale_value)
        weights = (scores - softmax_max[rows, :, :1].transpose(0, 1)).exp() / softmax_sum[rows, :, :1].transpose(0, 1)
        d_out, out = wide(dy[rows]).transpose(0, 1), wide(attention_in[rows]).transpose(0, 1)
        d_weights = d_out @ _by_head(v, head_num).transpose(1, 2)
        d_scores = weights * (d_weights - (d_out * out).sum(-1, keepdim=True)) * scale_value
        by_head = (
            d_scores @ _by_head(k, head_num),
            d_scores.transpose(1, 2) @ _by_head(q, head_num),
            weights.transpose(1, 2) @ d_out,
        )
        for grad, x, of in zip(grads, by_head, (rows, read, read), strict=True):
            heads = grad.shape[1]
            grad[of] = x.unflatten(0, (heads, -1)).sum(1).transpose(0, 1).to(grad.dtype)
    return *grads, None, query.new_empty(0)
