"""References of `torch.ops.npu`: results that op-plugin's published tests expect, gradients, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fusion.npu.emulator.operators import GRADIENTS, REFERENCES, VERSIONS, recorded_schemas, register

seeds = st.integers(0, 1 << 30)


@pytest.fixture(scope="module", autouse=True)
def npu():
    register()
    return torch.ops.npu


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def tensor(draw: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(draw.normal(size=shape).astype(np.float32))


def same_gradients(function, composed, *inputs: torch.Tensor) -> bool:
    """Compare values and gradients of both functions, for the same random output gradient."""
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    y, wanted = function(*ours), composed(*theirs)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    y.backward(grad)
    wanted.backward(grad)
    pairs = [(y, wanted), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def test_every_recorded_schema_has_a_reference_in_every_version():
    for version in VERSIONS:
        assert sorted(name.partition(".")[0] for name in recorded_schemas(version)) == sorted(REFERENCES)
    assert set(GRADIENTS) < set(REFERENCES)


@given(seed=seeds, rows=st.integers(1, 5), width=st.integers(1, 40))
def test_norms_and_swiglu_have_their_gradients(npu, seed, rows, width):
    draw = generator(seed)
    x, gamma = tensor(draw, rows, width), tensor(draw, width)
    composed = lambda x, gamma: F.rms_norm(x, (width,), gamma, 1e-6)  # noqa: E731
    assert same_gradients(lambda x, gamma: npu.npu_rms_norm(x, gamma, 1e-6)[0], composed, x, gamma)
    residual = tensor(draw, rows, width)
    y, rstd, total = npu.npu_add_rms_norm(x, residual, gamma, 1e-6)
    assert torch.equal(total, x + residual) and torch.allclose(y, composed(total, gamma), atol=1e-5)
    assert torch.allclose(rstd, (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    gate_up = tensor(draw, rows, 2 * width)
    silu = lambda x: F.silu(x[:, :width]) * x[:, width:]  # noqa: E731
    assert same_gradients(lambda x: npu.npu_swiglu(x, -1), silu, gate_up)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotation_turns_pairs_of_channels(npu, mode):
    """A pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
    draw = generator(0)
    x, angles = tensor(draw, 1, 3, 2, 8), tensor(draw, 1, 3, 1, 4)

    def spread(pairs):
        return torch.cat([pairs, pairs], -1) if mode == "half" else pairs.repeat_interleave(2, -1)

    def composed(x):
        a, b = x.chunk(2, -1) if mode == "half" else (x[..., ::2], x[..., 1::2])
        parts = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        return torch.cat(parts, -1) if mode == "half" else torch.stack(parts, -1).flatten(-2)

    factors = spread(angles.cos()), spread(angles.sin())
    assert same_gradients(lambda x: npu.npu_rotary_mul(x, *factors, mode), composed, x)


def test_gradients_of_the_factors_of_a_rotation(npu):
    draw = generator(1)
    inputs = tensor(draw, 1, 3, 2, 8), tensor(draw, 1, 3, 1, 8), tensor(draw, 1, 3, 1, 8)
    turned = lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1)  # noqa: E731
    assert same_gradients(npu.npu_rotary_mul, lambda x, cos, sin: x * cos + turned(x) * sin, *inputs)


@given(seed=seeds, rows=st.integers(1, 6), k=st.integers(1, 3), norm_type=st.integers(0, 1), mode=st.integers(0, 1))
def test_gating_chooses_in_groups(npu, seed, rows, k, norm_type, mode):
    """Against a loop over the rows that the page's formulas state."""
    draw = generator(seed)
    x, bias = draw.normal(size=(rows, 12)), draw.normal(size=12) / 4
    weights, experts, _ = npu.npu_moe_gating_top_k(
        torch.from_numpy(x).float(),
        k,
        bias=torch.from_numpy(bias).float(),
        k_group=2,
        group_count=4,
        group_select_mode=mode,
        norm_type=norm_type,
        routed_scaling_factor=2.5,
    )
    for row in range(rows):
        exponents = np.exp(x[row])
        scores = exponents / exponents.sum() if norm_type == 0 else 1 / (1 + np.exp(-x[row]))
        by_group = np.float32(scores + bias).reshape(4, 3)
        best = by_group.max(-1) if mode == 0 else np.sort(by_group, -1)[:, -2:].sum(-1)
        groups = np.argsort(-best, kind="stable")[:2]
        allowed = np.full((4, 3), -np.inf)
        allowed[groups] = by_group[groups]
        chosen = np.argsort(-allowed.ravel(), kind="stable")[:k]
        wanted = scores[chosen] / (scores[chosen].sum() + 1e-20 if norm_type == 1 else 1) * 2.5
        assert np.allclose(weights[row], wanted, atol=1e-6)
        assert np.allclose((scores + bias)[experts[row]], (scores + bias)[chosen], atol=1e-6), (
            "equals may change places"
        )


def test_gating_by_softmax(npu):
    """Over all experts, or with ``renorm`` over the chosen ones; of equals the first."""
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, 0.5, 4.0]])
    weights, experts, _ = npu.npu_moe_gating_top_k_softmax_v2(x, k=2)
    assert experts.tolist() == [[1, 2], [3, 2]] and experts.dtype == torch.int32
    assert torch.allclose(weights, x.softmax(-1).gather(-1, experts.long()))
    shares, again, _ = npu.npu_moe_gating_top_k_softmax_v2(x, k=2, renorm=1)
    assert torch.equal(again, experts) and torch.allclose(shares, weights / weights.sum(-1, keepdim=True))


def route(npu, x: torch.Tensor, experts: torch.Tensor, num_experts: int, active: range | None = None):
    return npu.npu_moe_init_routing_v2(
        x,
        experts.to(torch.int32),
        active_num=experts.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[active.start, active.stop] if active else [0, num_experts],
        quant_mode=-1,
        row_idx_type=0,
    )


def test_routing_of_the_published_example(npu):
    """Four tokens with two experts each, the example of op-plugin's page on permuting tokens."""
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    experts = torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]])
    rows, places, counts, _ = route(npu, x, experts, 5)
    assert rows.flatten().tolist() == [1, 4, 4, 3, 2, 1, 2, 3]
    assert places.tolist() == [0, 5, 6, 4, 7, 3, 1, 2] and places.dtype == torch.int32
    assert counts.tolist() == [1, 2, 1, 1, 3] and counts.dtype == torch.int64
    halves = torch.full((4, 2), 0.5)
    assert torch.equal(npu.npu_moe_token_unpermute(rows, places, halves), x), "back in order"


def test_routing_to_a_range_of_experts(npu):
    """Rows of the others are undefined and have no place, as the page says."""
    x, experts = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0, 3], [3, 2], [1, 4]])
    rows, places, counts, _ = route(npu, x, experts, 5, range(2, 4))
    assert rows[:3].flatten().tolist() == [2, 1, 2] and rows[3:].isnan().all()
    assert places.tolist() == [-1, 1, 2, 0, -1, -1] and counts.tolist() == [1, 2]


@given(seed=seeds, tokens=st.integers(1, 6), k=st.integers(1, 3))
def test_unrouting_has_its_gradients_and_routing_the_sum_of_them(npu, seed, tokens, k):
    draw = generator(seed)
    experts = torch.from_numpy(draw.integers(0, 4, (tokens, k)))
    x, probs = tensor(draw, tokens, 5), tensor(draw, tokens, k)
    rows, places, _, _ = route(npu, x, experts, 4)
    composed = lambda rows, probs: (rows[places.long()].view(tokens, k, 5) * probs[..., None]).sum(1)  # noqa: E731
    unpermute = lambda rows, probs: npu.npu_moe_token_unpermute(rows, places, probs)  # noqa: E731
    assert same_gradients(unpermute, composed, rows, probs)
    grad = npu.npu_moe_token_permute_grad_v2(rows, places, tokens, torch.float32, k)
    assert torch.allclose(grad, k * x, atol=1e-5), "each token's rows are its own"


@given(seed=seeds, counts=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_grouped_products(npu, seed, counts):
    draw = generator(seed)
    x, weights = tensor(draw, sum(counts), 6), tensor(draw, len(counts), 6, 3)
    options = dict(group_list=torch.tensor(counts), split_item=3, group_list_type=int(len(counts) > 1))
    wanted = torch.cat([rows @ weight for rows, weight in zip(x.split(counts), weights, strict=True)])
    for weight in ([weights], list(weights)):
        (y,) = npu.npu_grouped_matmul([x], weight, group_type=0, **options)
        assert torch.allclose(y, wanted, atol=1e-5)
    (y,) = npu.npu_grouped_matmul([x.t()], [wanted], group_type=2, **options)
    for one, rows, grad in zip(y, x.split(counts), wanted.split(counts), strict=True):
        assert torch.allclose(one, rows.t() @ grad, atol=1e-5)


def test_slots_of_a_cache_are_written(npu):
    draw = generator(2)
    key, value = tensor(draw, 3, 2, 4), tensor(draw, 3, 2, 4)
    caches = [torch.zeros(5, 8, 2, 4) for _ in range(2)]
    npu.npu_scatter_pa_kv_cache(key, value, *caches, torch.tensor([7, 32, 9], dtype=torch.int32), cache_mode="Norm")
    for rows, cache in ((key, caches[0]), (value, caches[1])):
        assert torch.equal(torch.stack([cache[0, 7], cache[4, 0], cache[1, 1]]), rows)
        assert cache.count_nonzero() == rows.numel()


@given(seed=seeds, lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4), shared=st.integers(1, 2))
def test_attention_over_blocks(npu, seed, lengths, shared):
    draw = generator(seed)
    heads, keys, values = 2, tensor(draw, 16, 2, 8, 4), tensor(draw, 16, 2, 8, 4)
    table = torch.from_numpy(np.stack([draw.permutation(16)[:3] for _ in lengths])).to(torch.int32)
    q = tensor(draw, len(lengths), heads * shared, 1, 4)
    out, _ = npu.npu_fused_infer_attention_score(
        q,
        keys,
        values,
        actual_seq_lengths_kv=lengths,
        block_table=table,
        num_heads=heads * shared,
        num_key_value_heads=heads,
        scale=0.3,
        input_layout="BNSD",
        block_size=8,
    )
    for row, length in enumerate(lengths):
        places = [(int(table[row, t // 8]), t % 8) for t in range(length)]
        k, v = (torch.stack([x[block, :, at] for block, at in places], 1) for x in (keys, values))
        wanted = F.scaled_dot_product_attention(q[row], k, v, scale=0.3, enable_gqa=True)
        assert torch.allclose(out[row], wanted, atol=1e-5)


@given(seed=seeds, lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_attention_over_blocks_of_latents(npu, seed, lengths):
    """As of blocks [blocks, 1, block size, D] of the joined channels, whose first are the values."""
    draw = generator(seed)
    compressed, rotated = tensor(draw, 16, 8, 4), tensor(draw, 16, 8, 2)
    table = torch.from_numpy(np.stack([draw.permutation(16)[:3] for _ in lengths])).to(torch.int32)
    q, q_rope = tensor(draw, len(lengths), 1, 3, 4), tensor(draw, len(lengths), 1, 3, 2)
    options = dict(actual_seq_lengths_kv=lengths, block_table=table, num_heads=3, num_key_value_heads=1, scale=0.3)
    rope = dict(query_rope=q_rope, key_rope=rotated)
    out, _ = npu.npu_fused_infer_attention_score(
        q, compressed, compressed, **rope, **options, input_layout="BSND_NBSD", block_size=8
    )
    assert out.shape == (3, len(lengths), 1, 4)
    joined = torch.cat([compressed, rotated], dim=-1).unsqueeze(1)
    wanted, _ = npu.npu_fused_infer_attention_score(
        torch.cat([q, q_rope], dim=-1).transpose(1, 2), joined, joined, **options, input_layout="BNSD", block_size=8
    )
    assert torch.allclose(out.squeeze(2).transpose(0, 1), wanted[:, :, 0, :4], atol=1e-5)


def test_products_with_transposed_rows_of_the_published_test(npu):
    x1, x2 = torch.randn(5, 3, 16), torch.randn(3, 16, 4)
    wanted = torch.matmul(x1.transpose(0, 1), x2).transpose(0, 1)
    found = npu.npu_transpose_batchmatmul(x1, x2, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    assert torch.allclose(found, wanted, atol=1e-5) and found.is_contiguous()
    assert torch.equal(npu.npu_transpose_batchmatmul(x1.transpose(0, 1), x2), found)


@given(seed=seeds, lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), shared=st.integers(1, 2))
def test_causal_attention_within_packed_sequences_has_its_gradients(npu, seed, lengths, shared):
    draw = generator(seed)
    mask, ends = torch.ones(2048, 2048, dtype=torch.bool).triu(1), np.cumsum(lengths).tolist()

    def packed(q, k, v):
        options = dict(atten_mask=mask, scale=0.3, actual_seq_qlen=ends, actual_seq_kvlen=ends, sparse_mode=3)
        return npu.npu_fusion_attention(q, k, v, q.shape[1], "TND", **options)[0]

    def composed(q, k, v):
        parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(*p, is_causal=True, scale=0.3, enable_gqa=True) for p in parts]
        return torch.cat(outs, 1).transpose(0, 1)

    rows = sum(lengths)
    inputs = tensor(draw, rows, 2 * shared, 8), tensor(draw, rows, 2, 8), tensor(draw, rows, 2, 8)
    assert same_gradients(packed, composed, *inputs)


def test_adamw_of_the_published_test(npu):
    """Three updates, as PyTorch's AdamW makes them."""
    draw = generator(3)
    var, grads = tensor(draw, 7), [tensor(draw, 7) for _ in range(3)]
    weight = var.clone().requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0.2)
    m, v = torch.zeros(7), torch.zeros(7)
    for step, grad in enumerate(grads):
        weight.grad = grad
        optimizer.step()
        scalars = 0.9**step, 0.95**step, 0.1, 0.2, 0.9, 0.95, 1e-8
        npu.npu_apply_adam_w.out(*scalars, grad, None, False, False, var=var, m=m, v=v)
        assert torch.allclose(var, weight.detach(), atol=1e-6)


def test_results_are_rounded_once(npu):
    """In bfloat16 a result is the float32 one of the same inputs, rounded."""
    draw = generator(4)
    x, gamma = tensor(draw, 5, 64).bfloat16(), tensor(draw, 64).bfloat16()
    assert torch.equal(npu.npu_rms_norm(x, gamma)[0], npu.npu_rms_norm(x.float(), gamma.float())[0].bfloat16())
    assert torch.equal(npu.npu_swiglu(x), npu.npu_swiglu(x.float()).bfloat16())
    weights = [x.t()[:, :2].contiguous(), x.t()[:, 2:4].contiguous()]
    options = dict(group_list=torch.tensor([2, 3]), split_item=3, group_type=0, group_list_type=1)
    (wide,) = npu.npu_grouped_matmul([x.float()], [weight.float() for weight in weights], **options)
    assert torch.equal(npu.npu_grouped_matmul([x], weights, **options)[0], wide.bfloat16())


def test_gradients_that_torch_npu_does_not_have_are_refused(npu):
    x = torch.ones(2, 4, requires_grad=True)
    weights = [torch.ones(4, 3), torch.ones(4, 3)]
    options = dict(group_list=torch.tensor([1, 1]), split_item=3, group_type=0, group_list_type=1)
    calls = {
        "npu_add_rms_norm": lambda: npu.npu_add_rms_norm(x, x, torch.ones(4)),
        "npu_grouped_matmul": lambda: npu.npu_grouped_matmul([x], weights, **options),
        "npu_transpose_batchmatmul": lambda: npu.npu_transpose_batchmatmul(x[None], x.t()[None]),
        "npu_moe_init_routing_v2": lambda: route(npu, x, torch.zeros(2, 1), 2),
        "npu_moe_gating_top_k_softmax_v2": lambda: npu.npu_moe_gating_top_k_softmax_v2(x),
        "npu_moe_gating_top_k": lambda: npu.npu_moe_gating_top_k(x, 1),
    }
    for name, call in calls.items():
        assert GRADIENTS[name] is None
        with pytest.raises(NotImplementedError, match=f"torch_npu derives no gradient of {name}"):
            call()
        with torch.no_grad():
            call()


def test_what_no_caller_uses_is_refused(npu):
    x = torch.ones(2, 4)
    with pytest.raises(TypeError, match="bias"):
        npu.npu_grouped_matmul([x], [x.t()], bias=[x[0]], group_list=torch.tensor([1, 1]))
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'eps'"):
        npu.npu_rms_norm(x, x[0], eps=1e-6)
