"""Ascend's table on the emulated card computes what the plain one does, with gradients; its limits and fallbacks."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.model.spec import Router
from fusion.npu import DeviceConfig, open_device
from fusion.npu.operators import AdamW, AdamWStates, PagedRows, Plain, composed_attention, limits, operators_of
from fusion.npu.operators.ascend import Ascend

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card"),
    pytest.mark.filterwarnings("ignore:.*composed of PyTorch"),
]
PLAIN = Plain()
seeds = st.integers(0, 1 << 30)


@pytest.fixture(scope="module")
def ascend() -> Ascend:
    device = open_device("emulated", index=8, capacity_bytes=256 << 20, operators="ascend")
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    yield device.operators
    torch.npu.set_device(0)


def draw(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to("npu")


def assert_alike(ascend: Ascend, function, *inputs: torch.Tensor) -> None:
    """Compare results and gradients of ``function(table, *inputs)``, and the results without gradients bitwise."""
    results, out_grads = [], None
    for table in (PLAIN, ascend):
        leaves = [x.clone().requires_grad_() for x in inputs]
        found = function(table, *leaves)
        outs = found if isinstance(found, tuple) else (found,)
        out_grads = out_grads or [torch.cos(out.detach()) for out in outs]
        torch.autograd.backward(outs, out_grads)
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        results.append([*outs, *grads])
    theirs, ours = results
    for one, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=5e-5)
    with torch.no_grad():
        again = function(ascend, *inputs)
    for one, once_more in zip(ours, again if isinstance(again, tuple) else (again,), strict=False):
        assert torch.equal(one, once_more), "the same kernel with gradients and without"


def rope_of(random, rows: int, width: int, interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    angles = random(rows, width // 2)
    cos, sin = angles.cos(), angles.sin()
    if interleaved:
        cosines, sines = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    else:
        cosines, sines = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return cosines.unsqueeze(1), sines.unsqueeze(1)


@given(seed=seeds, rows=st.integers(0, 5), width=st.integers(1, 20))
def test_norms_and_swiglu(ascend, seed, rows, width):
    random = draw(seed)
    x, residual, weight = random(rows, width), random(rows, width), random(width)
    assert_alike(ascend, lambda table, *xs: table.rms_norm(*xs, 1e-6), x, weight)
    assert_alike(ascend, lambda table, *xs: table.add_rms_norm(*xs, 1e-6), x, residual, weight)
    assert_alike(ascend, lambda table, x: table.swiglu(x), random(rows, 2 * width))


@given(
    seed=seeds, rows=st.integers(1, 4), heads=st.integers(1, 3), kv=st.integers(1, 2), passed=st.sampled_from([0, 6])
)
def test_norm_and_rotation(ascend, seed, rows, heads, kv, passed):
    random = draw(seed)
    qkv, rope = random(rows, heads + 2 * kv, 8 + passed), rope_of(random, rows, 8)
    norms = random(8 + passed), random(8 + passed)
    assert_alike(ascend, lambda table, x, *norms: table.norm_rope(x, *norms, rope, kv, 1e-6), qkv, *norms)
    assert_alike(ascend, lambda table, x: table.norm_rope(x, None, None, rope, kv, 1e-6), qkv)
    pairs = rope_of(random, rows, 8, interleaved=True)
    assert_alike(ascend, lambda table, x: table.rotate(x, pairs, True), random(rows, heads, 8))


ROUTERS = [
    Router(2),
    Router(3, normalise=True),
    Router(2, "sigmoid", normalise=True, correction=True, groups=4, top_groups=2, scale=2.5),
    Router(2, groups=4, top_groups=2, scale=3.0, group_scores="best"),
    Router(2, "sigmoid", scale=2.0),
]


@given(seed=seeds, rows=st.integers(0, 6), router=st.sampled_from(ROUTERS))
def test_gating_chooses_alike(ascend, seed, rows, router):
    random = draw(seed)
    logits, correction = random(rows, 12), random(12) / 10 if router.correction else None
    (weights, experts), (wanted, chosen) = (table.gate(logits, router, correction) for table in (ascend, PLAIN))
    assert torch.equal(experts.long(), chosen)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6)


def test_gating_that_the_operator_does_not_compute_is_said_once(ascend):
    table, router = Real(), Router(2, "sigmoid", scale=2.0)
    with pytest.warns(UserWarning, match="npu_moe_gating_top_k: normalises sigmoids always") as said:
        for _ in range(2):
            table.gate(draw(7)(3, 12), router, None)
    assert len(said) == 1


@given(seed=seeds, rows=st.integers(0, 6), k=st.integers(1, 3), stacked=st.booleans())
def test_experts(ascend, seed, rows, k, stacked):
    """From routing to the weighted sum, with matrices in a list and stacked; some experts have no rows."""
    random = draw(seed)
    experts = torch.randint(0, 5, (rows, k), generator=torch.Generator().manual_seed(seed)).to("npu")
    gate_up, down = random(5, 6, 4) / 2, random(5, 4, 3) / 2

    def layer(table, x, weights, *matrices):
        if not stacked:
            matrices = [list(matrix.unbind(0)) for matrix in matrices]
        rows, order, counts = table.permute(x, experts, 5)
        assert counts.tolist() == torch.bincount(experts.flatten(), minlength=5).tolist()
        return table.unpermute(table.experts(rows, counts, matrices), order, weights)

    assert ascend.takes_counts(gate_up, 5) and not ascend.takes_counts(gate_up, 5, row_multiple=16)
    assert_alike(ascend, layer, random(rows, 4), random(rows, k), gate_up, down)


@given(seed=seeds, rows=st.integers(0, 6), k=st.integers(1, 3), ends=st.sampled_from([(2, 6), (1, 3, 6), (3, 4, 6)]))
def test_the_sums_of_local_experts_are_the_sum_of_all(ascend, seed, rows, k, ends):
    random = draw(seed)
    experts = torch.stack(
        [torch.randperm(6, generator=torch.Generator().manual_seed(seed + r)) for r in range(rows + 1)]
    )
    experts = experts[:rows, :k].to("npu")
    x, weights, gate_up, down = random(rows, 4), random(rows, k), random(6, 6, 4) / 2, random(6, 4, 3) / 2
    for table in (ascend, PLAIN):
        ordered, order, counts = table.permute(x, experts, 6)
        whole = table.unpermute(table.experts(ordered, counts, (gate_up, down)), order, weights)
        parts = [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]
        sums = [
            table.local_experts(x, experts, weights, 6, part, [one[part.start : part.stop] for one in (gate_up, down)])
            for part in parts
        ]
        torch.testing.assert_close(sum(sums), whole, rtol=1e-4, atol=1e-5)


@given(seed=seeds, lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), narrow=st.sampled_from([0, 3]))
def test_attention_of_packed_sequences(ascend, seed, lengths, narrow):
    random, rows = draw(seed), sum(lengths)
    inputs = random(rows, 4, 8), random(rows, 2, 8), random(rows, 2, 8 - narrow)
    assert_alike(ascend, lambda table, *qkv: table.varlen_attention(*qkv, lengths, 0.4), *inputs)
    assert_alike(ascend, lambda table, *qkv: table.varlen_attention(*qkv, lengths), *inputs)


def test_more_sequences_than_the_operator_takes_are_attended_in_parts(ascend, monkeypatch):
    random, lengths = draw(5), [3, 1, 2, 4, 1]
    inputs = random(11, 4, 8), random(11, 2, 8), random(11, 2, 8)
    whole = ascend.varlen_attention(*inputs, lengths)
    monkeypatch.setattr(limits, "MAX_PACKED_SEQUENCES", 2)
    assert torch.equal(ascend.varlen_attention(*inputs, lengths), whole)
    assert_alike(ascend, lambda table, *qkv: table.varlen_attention(*qkv, lengths), *inputs)
    kv_lengths = [3, 4, 5, 4, 2]
    inputs = random(11, 4, 8), random(18, 2, 8), random(18, 2, 8)
    assert_alike(ascend, lambda table, *qkv: table.varlen_attention(*qkv, lengths, 0.3, kv_lengths), *inputs)


def test_routing_beyond_a_limit_takes_the_experts_that_gating_returns(ascend):
    table, random = Real(), draw(6)
    _, experts = table.gate(random(3, 6), Router(2), None)
    rows, order, counts = table.permute(random(3, 4).double(), experts, 6)
    weights = torch.ones(3, 2, dtype=torch.float64, device="npu")
    assert counts.sum() == 6 and table.unpermute(rows, order, weights).shape == (3, 4)


@given(seed=seeds, lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_attention_over_blocks_that_were_stored(ascend, seed, lengths):
    random = draw(seed)
    pools = [torch.zeros(2 * 10, 2, 4, 8, device="npu") for _ in range(2)]
    blocks = torch.randperm(9, generator=torch.Generator().manual_seed(seed)).view(3, 3)[: len(lengths)].to("npu")
    rows = PagedRows(
        blocks.flatten(),
        torch.arange(0, 3 * len(lengths), 3, device="npu"),
        torch.tensor(lengths, device="npu"),
        blocks.to(torch.int32),
        tuple(lengths),
    )
    # Token t of row r is in its block t // 4 at t % 4; the first token goes to a spare block too.
    places = [(int(blocks[row, t // 4]), t % 4) for row, length in enumerate(lengths) for t in range(length)]
    spare = [(9, places[0][1])]
    slots = torch.tensor([(block * 2 + head) * 4 + at for block, at in places + spare for head in range(2)])
    k, v = random(len(places), 2, 8), random(len(places), 2, 8)
    for table, pool in zip((ascend, PLAIN), pools, strict=True):
        table.store_kv(pool, torch.cat([slots, slots + 10 * 2 * 4]).to("npu"), k, v, torch.tensor([0], device="npu"))
    assert torch.equal(*pools) and pools[0].count_nonzero() == 2 * 2 * 8 * (len(places) + 1)
    q = random(len(lengths), 4, 8)
    ours, theirs = (table.paged_attention(q, pools[0], rows, None, 0.3) for table in (ascend, PLAIN))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@given(seed=seeds, lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3), invariant=st.booleans())
def test_attention_over_latents_that_were_stored(ascend, seed, lengths, invariant):
    """On the emulated card, and on a real one, where toy sizes are beyond limits and composed."""
    random, pools = draw(seed), [torch.zeros(10, 1, 4, 12, device="npu") for _ in range(3)]
    blocks = torch.randperm(9, generator=torch.Generator().manual_seed(seed)).view(3, 3)[: len(lengths)].to("npu")
    first, on_card = torch.arange(0, 3 * len(lengths), 3, device="npu"), torch.tensor(lengths, device="npu")
    table_RB = blocks.to(torch.int32)
    rows = PagedRows(blocks.flatten(), first, on_card, table_RB, tuple(lengths), invariant)
    places = [int(blocks[row, t // 4]) * 4 + t % 4 for row, length in enumerate(lengths) for t in range(length)]
    slots, repeated = torch.tensor([*places, 36 + places[0] % 4], device="npu"), torch.tensor([0], device="npu")
    latents = random(len(places), 8), random(len(places), 4)
    nope, rotated = random(len(lengths), 2, 8), random(len(lengths), 2, 4)
    found = []
    for table, pool in zip((PLAIN, ascend, Real()), pools, strict=True):
        table.store_latents(pool, slots, *latents, repeated)
        found.append(table.paged_latent_attention(nope, rotated, pool, rows, 0.3))
    assert torch.equal(torch.cat(ascend.areas(pools[1], 8), dim=-1), pools[0])
    assert torch.equal(pools[1], pools[2]) and pools[0].count_nonzero() == 12 * (len(places) + 1)
    for ours in found[1:]:
        torch.testing.assert_close(ours, found[0], rtol=1e-4, atol=1e-5)


@given(seed=seeds, rows=st.integers(0, 4), heads=st.integers(1, 3), heads_first=st.booleans())
def test_products_by_head(ascend, seed, rows, heads, heads_first):
    random = draw(seed)
    x = random(heads, rows, 8).transpose(0, 1) if heads_first else random(rows, heads, 8)
    weight = random(heads, 6, 8).transpose(1, 2)
    for row_multiple in (1, 16):
        ours, theirs = (table.head_linear(x, weight, row_multiple) for table in (ascend, PLAIN))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@given(seed=seeds, pieces=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=3))
def test_chunks_attend_to_what_precedes_them(ascend, seed, pieces):
    random, lengths, kv_lengths = draw(seed), [rows for rows, _ in pieces], [rows + before for rows, before in pieces]
    q, k, v = random(sum(lengths), 4, 8), random(sum(kv_lengths), 2, 8), random(sum(kv_lengths), 2, 5)
    with patch.object(composed_attention, "MASKED_ROWS", 4):
        ours, theirs = (table.varlen_attention(q, k, v, lengths, 0.3, kv_lengths) for table in (ascend, PLAIN))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    whole = zip(q.split(lengths), k.split(kv_lengths), v.split(kv_lengths), pieces, strict=True)
    for found, (q, k, v, (rows, before)) in zip(theirs.split(lengths), whole, strict=True):
        padded = torch.cat([q.new_zeros(before, 4, 8), q])
        wanted = PLAIN.varlen_attention(padded, k, v, [rows + before], 0.3)[before:]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_adamw(ascend):
    random = draw(1)
    states = [[random(7), random(3, 2)] for _ in range(2)] + [[torch.zeros(7), torch.zeros(3, 2)] for _ in range(2)]
    ours, theirs = ([[x.to("npu", copy=True) for x in kind] for kind in states] for _ in range(2))
    for step in range(3):
        for table, tensors in ((ascend, ours), (PLAIN, theirs)):
            table.adamw(AdamWStates(*tensors), AdamW(step, lr=0.1, betas=(0.9, 0.95), weight_decay=0.2, eps=1e-8))
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


class Real(Ascend):
    """The table as on a real card: what is beyond a limit is composed."""

    def __init__(self) -> None:
        super().__init__()
        self._is_emulated = False


def test_what_is_beyond_a_limit_is_composed_and_said_once(ascend, recwarn):
    table, random = Real(), draw(2)
    rope, x = rope_of(random, 3, 8), random(3, 1000, 8)
    for _ in range(2):
        assert torch.equal(table.rotate(x, rope), PLAIN.rotate(x, rope))
    (warning,) = recwarn
    assert "npu_rotary_mul: sequences times heads = 1000, expected at most 999" in str(warning.message)
    assert "composed of PyTorch's operators" in str(warning.message)
    stack = torch.zeros(1025, 4, 8, dtype=torch.bfloat16, device="npu")
    counts = torch.tensor([3] + [0] * 1024, device="npu")
    with pytest.warns(UserWarning, match="groups = 1025, expected at least 1, at most 1024"):
        assert torch.equal(
            table.grouped_linear(x[:, 0].bfloat16(), stack, counts), torch.zeros_like(x[:, 0, :4]).bfloat16()
        )


@given(seed=seeds, rows=st.integers(1, 6), behind=st.integers(0, 2))
def test_the_only_expert_of_a_card_runs_its_operator(ascend, seed, rows, behind):
    """As where there are as many EP ranks as experts: composed products would wait for the count, twice a layer."""
    random, counts = draw(seed), torch.tensor([rows], device="npu")
    gate_up, down = random(1, 6, 4) / 2, random(1, 4, 3) / 2
    with patch.object(Plain, "grouped_linear", side_effect=AssertionError("composed")):
        x, stack = random(rows + behind, 4).bfloat16(), random(1, 3, 4).bfloat16()
        y = Real().grouped_linear(x, stack, counts)
        torch.testing.assert_close(y[:rows], x[:rows] @ stack[0].t(), rtol=0.02, atol=0.02)
        with_gradients = ascend.experts(random(rows, 4).requires_grad_(), counts, (gate_up, down))
        assert with_gradients.grad_fn is not None
    assert_alike(
        ascend, lambda table, *inputs: table.experts(inputs[0], counts, inputs[1:]), random(rows, 4), gate_up, down
    )


def test_an_emulated_card_reports_limits_and_goes_on(ascend):
    x = draw(3)(3, 1000, 8)
    table = type(ascend)()
    with pytest.warns(UserWarning, match="sequences times heads = 1000.*made nevertheless on the emulated card"):
        assert table._takes(torch.ops.npu.npu_rotary_mul.default, x, (x.unsqueeze(0), x, x))


def grouped(
    weights: int, dtype: torch.dtype = torch.bfloat16, dims: int = 2, groups: int = 0, kind: int = 1
) -> list[str]:
    weight = torch.empty(*(() if dims == 2 else (groups,)), 4, 4, dtype=dtype, device="meta")
    arguments = dict(
        x=[torch.empty(8, 4, dtype=dtype, device="meta")],
        weight=[weight] * weights,
        group_list=torch.empty(groups or weights, device="meta"),
        group_type=0,
        group_list_type=kind,
    )
    return limits.beyond("npu_grouped_matmul", arguments)


def test_limits_of_grouped_products():
    assert not grouped(128) and not grouped(1, dims=3, groups=256) and not grouped(1, torch.float32, 3, 8)
    assert "weights in a list = 129, expected at most 128" in grouped(129)[0]
    assert "float32" in grouped(8, torch.float32)[0]
    assert "groups = 1025, expected at least 1, at most 1024" in grouped(1, dims=3, groups=1025)[0]
    assert not grouped(1, dims=3, groups=1, kind=0) and "more than one group" in grouped(1, dims=3, groups=1)[0]


@given(
    channels=st.integers(1, 40),
    outputs=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_limits_of_cudas_grouped_products_are_those_of_torchs_meta_kernel(channels, outputs, dtype):
    x = torch.empty(8, channels, dtype=dtype, device="meta")
    weights = torch.empty(3, outputs, channels, dtype=dtype, device="meta").transpose(1, 2)
    broken = limits.beyond("grouped_mm", {"mat_a": x, "mat_b": weights})
    try:
        torch.nn.functional.grouped_mm(x, weights, offs=torch.empty(3, dtype=torch.int32, device="meta"))
        accepted = True
    except RuntimeError:
        accepted = False
    assert accepted == (not broken)


def test_limits_of_cudas_attention_over_pages():
    def beyond(page: int, channels: int = 128) -> list[str]:
        query, keys = (torch.empty(*shape, 4, channels, dtype=torch.bfloat16) for shape in ((2,), (3, page)))
        return limits.beyond("varlen_attn", {"query": query, "key": keys, "block_table": torch.zeros(2, 1)})

    assert not beyond(256) and not beyond(512)
    assert "tokens of a page = 128, expected a multiple of 256" in beyond(128)[0]
    assert "channels = 576" in beyond(256, 576)[0]


def test_every_limit_has_a_source_and_a_bound():
    for operator, bounds in limits.LIMITS.items():
        for limit in bounds:
            assert limit.source and limit.what, operator
            assert limit.one_of or (limit.at_least, limit.at_most, limit.multiple_of) != (None, None, 1), operator


def test_tables_by_kind_and_name():
    assert operators_of("npu", "plain").name == "plain" and operators_of("emulated").name == "cpu"
    for kind, operators in (("cuda", "ascend"), ("npu", "cpu")):
        with pytest.raises(ValueError, match=rf"device.operators='{operators}': expected device.kind=.*; it is {kind}"):
            DeviceConfig(kind=kind, operators=operators).validate()
    DeviceConfig(kind="emulated", operators="ascend").validate()
