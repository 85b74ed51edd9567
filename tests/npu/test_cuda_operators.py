"""CUDA's table computes what the plain one does: grouped products on the CPU, attention by a reference of the operator
that needs a card, and every call on fake tensors of a card."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion.model.spec import Router
from fusion.npu import config
from fusion.npu.emulator import BuildError, install
from fusion.npu.operators import PagedRows, Plain, composed_attention, cuda, registry
from fusion.npu.operators.cuda import Cuda

PLAIN = Plain()
PAGE = 256
seeds = st.integers(0, 1 << 30)


@pytest.fixture(scope="module", autouse=True)
def emulated_cards_are_known():
    """PyTorch counts the devices that compute gradients once, in the first backward pass of a process: the emulated
    ones of later tests would be none."""
    with suppress(BuildError):
        install()


def reference(q, keys, values, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """Attention as `torch.nn.attention.varlen.varlen_attn` documents it, in float32."""
    assert options["enable_gqa"] == (q.shape[1] != keys.shape[-2]) and q.dtype in (torch.bfloat16, torch.float16)
    assert cu_seq_q.dtype == torch.int32 and max_q == int(cu_seq_q.diff().max())
    paged, outs = options.get("block_table"), []
    for row, (start, stop) in enumerate(zip(cu_seq_q[:-1], cu_seq_q[1:], strict=True)):
        if paged is None:
            k, v = (x[cu_seq_k[row] : cu_seq_k[row + 1]] for x in (keys, values))
            assert len(k) <= max_k
        else:
            assert keys.shape[1] % PAGE == 0 and paged.dtype == options["seqused_k"].dtype == torch.int32
            length = int(options["seqused_k"][row])
            assert length <= max_k
            k, v = (x[paged[row].long()].flatten(0, 1)[:length] for x in (keys, values))
        k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q[start:stop].float(), k) * options["scale"]
        if options.get("window_size") == (-1, 0):  # causal, by the lower right corner
            mask = torch.ones_like(scores[0], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
            scores = scores.masked_fill(~mask, -torch.inf)
        outs.append(torch.einsum("hqk,khc->qhc", scores.softmax(-1), v))
    return torch.cat(outs).to(q.dtype)


@given(seed=seeds, rows=st.integers(0, 6), k=st.integers(1, 3))
def test_experts(seed, rows, k):
    """From routing to the weighted sum, with gradients; some experts have no rows."""
    torch.manual_seed(seed)
    experts, table, results = torch.randint(0, 5, (rows, k)), Cuda(), []
    inputs = [torch.randn(*shape) / 4 for shape in ((rows, 16), (rows, k), (5, 32, 16), (5, 16, 16))]
    for operators in (table, PLAIN):
        x, weights, *stacks = (one.to(torch.bfloat16).requires_grad_() for one in inputs)
        found, order, counts = operators.permute(x, experts, 5)
        counts = counts if operators.takes_counts(found, 5) else counts.tolist()
        y = operators.unpermute(operators.experts(found, counts, stacks), order, weights)
        y.backward(torch.cos(y.detach()))
        results.append([y, x.grad, weights.grad, *(one.grad for one in stacks)])
    assert table.takes_counts(x, 5) and not table.takes_counts(x, 5, 16)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.01)


def test_experts_in_float32_are_composed_and_said_once(recwarn):
    table = Cuda()
    for _ in range(2):
        assert not table.takes_counts(torch.zeros(3, 16), 5)
    (warning,) = recwarn
    assert "grouped_mm: dtype of mat_a = torch.float32" in str(warning.message)
    assert "composed of other operators" in str(warning.message)


@pytest.mark.filterwarnings("ignore:grouped_mm")
@given(seed=seeds, rows=st.integers(0, 6), k=st.integers(1, 3), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_the_sums_of_local_experts_are_the_sum_of_all(seed, rows, k, dtype):
    """Whether grouped products leave the other experts' rows unwritten, or are composed."""
    torch.manual_seed(seed)
    experts, table = torch.rand(rows, 6).argsort(-1)[:, :k], Cuda()
    shapes = (rows, 16), (rows, k), (6, 32, 16), (6, 16, 16)
    x, weights, *stacks = ((torch.randn(*shape) / 4).to(dtype) for shape in shapes)
    ordered, order, counts = PLAIN.permute(x, experts, 6)
    whole = PLAIN.unpermute(PLAIN.experts(ordered, counts, stacks), order, weights)
    sums = [
        table.local_experts(x, experts, weights, 6, part, [stack[part.start : part.stop] for stack in stacks])
        for part in (range(2), range(2, 6))
    ]
    torch.testing.assert_close(sum(sums), whole, rtol=0.05, atol=0.01)


@given(seed=seeds, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), narrow=st.sampled_from([0, 3]))
def test_attention_of_packed_sequences(seed, lengths, narrow):
    torch.manual_seed(seed)
    qkv = [torch.randn(sum(lengths), heads, width) for heads, width in ((4, 8), (2, 8), (2, 8 - narrow))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "varlen_attn", lambda *args, scale, **options: reference(*args, scale=scale, **options))
        found = Cuda().varlen_attention(*(x.to(torch.bfloat16) for x in qkv), lengths, 0.3)
    torch.testing.assert_close(found.float(), PLAIN.varlen_attention(*qkv, lengths, 0.3), rtol=0.05, atol=0.05)


@given(seed=seeds, pieces=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=3))
def test_chunks_attend_to_what_precedes_them(seed, pieces):
    torch.manual_seed(seed)
    lengths, kv_lengths = [rows for rows, _ in pieces], [rows + before for rows, before in pieces]
    qkv = [torch.randn(sum(n), heads, 8) for n, heads in ((lengths, 4), (kv_lengths, 2), (kv_lengths, 2))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "varlen_attn", lambda *args, scale, **options: reference(*args, scale=scale, **options))
        found = Cuda().varlen_attention(*(x.to(torch.bfloat16) for x in qkv), lengths, 0.3, kv_lengths)
    wanted = PLAIN.varlen_attention(*qkv, lengths, 0.3, kv_lengths)
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("invariant", [False, True])
def test_latents_of_all_rows_are_gathered_at_once_if_few_and_by_row_if_invariant(monkeypatch, invariant):
    calls, pool, lengths = [], torch.randn(9, 1, 4, 12), (3, 9, 4)
    attends = "scaled_dot_product_attention"
    attend = getattr(composed_attention.F, attends)
    monkeypatch.setattr(composed_attention.F, attends, lambda *a, **kw: calls.append(a) or attend(*a, **kw))
    blocks = torch.randperm(9).view(3, 3)
    rows = PagedRows(blocks.flatten(), torch.arange(3) * 3, torch.tensor(lengths), blocks.int(), lengths, invariant)
    q = torch.randn(3, 2, 12)
    table = Cuda()
    with pytest.warns(UserWarning, match="varlen_attn: takes no latents: composed") as said:
        found, _ = (table.paged_attention(q, pool, rows, 8, 0.3) for _ in range(2))
    assert len(calls) == (6 if invariant else 2) and len(said) == 1
    calls.clear()
    for row, length in enumerate(lengths):
        latents = pool[blocks[row]].flatten(0, 2)[:length]
        scores = (torch.einsum("hc,sc->hs", q[row], latents) * 0.3).softmax(-1)
        torch.testing.assert_close(found[row], scores @ latents[:, :8])
    monkeypatch.setattr(composed_attention, "MAX_GATHERED_TOKENS", 24)
    torch.testing.assert_close(Cuda().paged_attention(q, pool, rows, 8, 0.3), found)
    assert len(calls) == (3 if invariant else 2), "two rows of at most 12 tokens, then one"


@given(seed=seeds, lengths=st.lists(st.integers(1, 2 * PAGE), min_size=1, max_size=3), invariant=st.booleans())
def test_attention_over_blocks(seed, lengths, invariant):
    torch.manual_seed(seed)
    kv, options = [torch.randn(2, length, 2, 8) for length in lengths], []
    blocks = torch.randperm(2 * len(lengths) + 1)[: 2 * len(lengths)].view(-1, 2)
    pool = torch.full((2 * (2 * len(lengths) + 1), 2, PAGE, 8), torch.nan, dtype=torch.bfloat16)
    keys, values = pool.chunk(2)
    for row, (k, v) in enumerate(kv):
        for t in range(len(k)):
            keys[blocks[row, t // PAGE], :, t % PAGE] = k[t].to(torch.bfloat16)
            values[blocks[row, t // PAGE], :, t % PAGE] = v[t].to(torch.bfloat16)
    first = torch.arange(0, 2 * len(lengths), 2)
    rows = PagedRows(blocks.flatten(), first, torch.tensor(lengths), blocks.to(torch.int32), tuple(lengths), invariant)
    q = torch.randn(len(lengths), 4, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "varlen_attn", lambda *a, **kw: options.append(kw) or reference(*a, **kw))
        table = Cuda()
        found = [table.paged_attention(q.to(torch.bfloat16), pool, rows, None, 0.3) for _ in range(2)]
    assert torch.equal(*found) and options[0]["num_splits"] == (1 if invariant else None)
    for row, (k, v) in enumerate(kv):
        wanted = PLAIN.varlen_attention(
            torch.cat([torch.zeros(len(k) - 1, 4, 8), q[row : row + 1]]), k, v, [len(k)], 0.3
        )[-1]
        torch.testing.assert_close(found[0][row].float(), wanted, rtol=0.05, atol=0.05)


def test_norms_equal_the_plain_ones_within_rounding():
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    for dtype, atol in ((torch.float32, 1e-6), (torch.bfloat16, 0.05)):
        args = [one.to(dtype) for one in (x, residual, weight)]
        for ours, theirs in zip(Cuda().add_rms_norm(*args, 1e-6), PLAIN.add_rms_norm(*args, 1e-6), strict=True):
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=0.02)


def test_operators_of_a_card_take_the_calls():
    """Fake tensors of a card have the shape checks of its operators."""
    lengths = [3, 300]
    with FakeTensorMode(), torch.inference_mode():

        def fake(*shape, dtype=torch.bfloat16):
            return torch.empty(*shape, dtype=dtype, device="cuda")

        table = Cuda()
        x = fake(8, 64)
        counts = fake(4, dtype=torch.int64)
        assert table.experts(x, counts, (fake(4, 96, 64), fake(4, 64, 48))).shape == (8, 64)
        q, k = fake(303, 8, 64), fake(303, 2, 64)
        assert table.varlen_attention(q, k, k, lengths).shape == (303, 8, 64)
        k = fake(1000, 2, 64)
        assert table.varlen_attention(q, k, k, lengths, None, [100, 900]).shape == (303, 8, 64)
        blocks = fake(2, 2, dtype=torch.int32)
        rows = PagedRows(fake(4, dtype=torch.int64), fake(2, dtype=torch.int64), fake(2, dtype=torch.int64), blocks)
        rows = rows._replace(host_lengths=(3, 300))
        out = table.paged_attention(fake(2, 8, 64), fake(20, 2, PAGE, 64), rows, None, 0.1)
        assert out.shape == (2, 8, 64) and out.device.type == "cuda"


@pytest.mark.parametrize(
    ("installed", "triton", "name"),
    [
        ("2.13.0+cpu", False, "cuda"),
        ("2.12.1", False, "plain"),
        ("2.13.0", True, "cuda_fused"),
        ("2.11.0", True, "cuda_fused"),
        ("2.10.0", True, "plain"),
    ],
)
def test_a_card_has_the_fastest_table_for_which_all_is_installed(monkeypatch, installed, triton, name):
    monkeypatch.setattr(config, "version", lambda package: installed)
    monkeypatch.setattr(config, "find_spec", lambda package: object() if triton else None)
    assert config.table_of("cuda") == name and config.table_of("npu") == "ascend"
    assert registry.block_tokens("cuda") == (1 if name == "plain" else PAGE)


@pytest.mark.parametrize(
    ("name", "installed", "lack"),
    [
        ("cuda_fused", "2.13.0", "needs triton"),
        ("cuda_fused", "2.9.1", "needs torch 2.11, installed is 2.9.1"),
        ("cuda", "2.12.0", "needs torch 2.13"),
    ],
)
def test_a_table_whose_needs_are_not_installed_is_refused_by_key(monkeypatch, name, installed, lack):
    monkeypatch.setattr(config, "version", lambda package: installed)
    monkeypatch.setattr(config, "find_spec", lambda package: None)
    registry.operators_of.cache_clear()
    with pytest.raises(ValueError, match=rf"device.operators={name}: it {lack}.*expected auto"):
        registry.operators_of("cuda", name)


def test_the_tables_that_stack_experts_are_those_that_a_plan_counts():
    importable = [name for name in registry.TABLES if name != "cuda_fused" or find_spec("triton")]
    stacking = {name for name in importable if registry.operators_of("npu", name).stacks_experts}
    assert stacking == {*config.STACKING} & {*importable}


def test_gradients_of_attention_are_added_in_one_order():
    """PyTorch's kernel reads a flag of the process: it is set for the backward pass of attention alone."""

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return q * 2

        @staticmethod
        def backward(ctx, grad):
            asked.append(torch.are_deterministic_algorithms_enabled())
            assert not torch.utils.deterministic.fill_uninitialized_memory
            return grad * 2

    asked: list[bool] = []
    q, k = torch.randn(3, 4, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(3, 2, 64, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "varlen_attn", lambda q, *args, **options: Attend.apply(q))
        out = Cuda().varlen_attention(q, k, k, [3])
    out.sum().backward()
    assert asked == [True] and not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_attention_to_a_part_of_the_tokens_is_composed_and_said_once():
    table, pool, blocks = Cuda(), torch.randn(6, 2, 4, 8), torch.arange(3).view(3, 1)
    rows = PagedRows(blocks.flatten(), torch.arange(3), torch.ones(3).long(), blocks.int(), (1, 1, 1))
    with pytest.warns(UserWarning, match="varlen_attn: not used where ranks share KV") as said:
        found, _ = (table.partial_attention(torch.randn(3, 4, 8), pool, rows, None, 0.3) for _ in range(2))
    assert found[1].shape == (3, 4) and len(said) == 1


def test_what_a_card_does_not_take_is_composed_and_said_once():
    table, x = Cuda(), torch.randn(3, 2, 8)
    with pytest.warns(UserWarning, match="varlen_attn: dtype of query = torch.float32.*composed") as said:
        for _ in range(2):
            found = table.varlen_attention(x, x, x, [3])
    assert torch.equal(found, PLAIN.varlen_attention(x, x, x, [3])) and len(said) == 1


@given(seed=seeds, rows=st.integers(0, 4), passed=st.sampled_from([0, 6]), normed=st.booleans())
def test_rotation_and_its_gradient(seed, rows, passed, normed):
    torch.manual_seed(seed)
    angles = torch.randn(rows, 4)
    rope = tuple(torch.cat(pair, -1).unsqueeze(1) for pair in ((angles.cos(),) * 2, (-angles.sin(), angles.sin())))
    qkv, norms, results = torch.randn(rows, 5, 8 + passed), torch.randn(2, 8 + passed), []
    for operators in (Cuda(), PLAIN):
        x, q_norm, k_norm = (one.clone().requires_grad_() for one in (qkv, *norms))
        q, k, v = operators.norm_rope(x, *((q_norm, k_norm) if normed else (None, None)), rope, 1, 1e-6)
        torch.autograd.backward([q, k, v], [torch.cos(one.detach()) for one in (q, k, v)])
        results.append([q, k, v, x.grad] + ([q_norm.grad, k_norm.grad] if normed else []))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@given(seed=seeds, rows=st.integers(0, 5), normalise=st.booleans())
def test_gating(seed, rows, normalise):
    torch.manual_seed(seed)
    logits, router = torch.randn(rows, 12), Router(3, normalise=normalise)
    (weights, experts), (wanted, chosen) = (table.gate(logits, router, None) for table in (Cuda(), PLAIN))
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, wanted)
