"""Fused operators compute what the same functions composed of PyTorch's operators do, and row by row."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.model import Mesh
from fusion.model.config import ModelConfig
from fusion.model.moe import MoE
from fusion.model.spec import Router
from fusion.npu.operators import PagedRows, operators_of
from fusion.npu.operators.cpu import load
from tests.helpers import in_fork, tiny_checkpoint

seeds = st.integers(0, 1 << 30)
CPU = operators_of("emulated")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    if load() is None:
        pytest.skip("no compiler to build the fused operators with")


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def both(function, *args):
    """Return what ``function`` gives in inference mode, and outside, where it is composed."""
    with torch.inference_mode():
        found = function(*args)
    return found, function(*args)


@given(seed=seeds, rows=st.integers(0, 9), width=st.integers(1, 70))
def test_norm_and_swiglu_equal_the_composed(seed, rows, width):
    draw = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, width, generator=draw), torch.randn(width, generator=draw)
    assert near(*both(CPU.rms_norm, x, weight, 1e-6))
    assert near(*both(CPU.swiglu, 20 * torch.randn(rows, 2 * width, generator=draw)))


@given(
    seed=seeds,
    rows=st.integers(0, 5),
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 20),
    passed=st.sampled_from([0, 0, 1, 6]),
    normed=st.booleans(),
)
def test_norm_and_rope_equal_the_composed(seed, rows, heads, kv_heads, half, passed, normed):
    """Of ``passed`` channels that are not rotated, and also without norms."""
    draw = torch.Generator().manual_seed(seed)
    channels = 2 * half + passed
    qkv = torch.randn(rows, heads + 2 * kv_heads, channels, generator=draw)
    norms = torch.randn(2, channels, generator=draw) if normed else (None, None)
    rope = tuple(torch.randn(2, rows, 1, 2 * half, generator=draw))
    for found, wanted in zip(*both(CPU.norm_rope, qkv, *norms, rope, kv_heads, 1e-6), strict=True):
        assert near(found, wanted)


@pytest.mark.parametrize("multiple", [1, 16])
def test_moe_equals_the_composed_and_routes_alike(tmp_path, multiple):
    config = ModelConfig.from_hf(tiny_checkpoint(str(tmp_path)))
    draw = torch.Generator().manual_seed(0)
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, range(config.num_experts)
    shapes = {"router": (config.num_experts, hidden)}
    shapes |= {f"experts.{e}.gate_up": (2 * inner, hidden) for e in experts}
    shapes |= {f"experts.{e}.down": (hidden, inner) for e in experts}
    weights = {name: 0.3 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    moe = MoE(config.experts, Mesh.single(), CPU, weights)
    for rows in (0, 1, 37):
        x = torch.randn(rows, hidden, generator=draw)
        (y, routed), (wanted, wanted_routed) = both(moe, x, multiple)
        assert near(y, wanted) and torch.equal(routed.expert_nk, wanted_routed.expert_nk)


def gate(logits: torch.Tensor, k: int):
    with torch.inference_mode():
        return CPU.gate(logits, Router(k, normalise=True), None)


def test_equally_likely_experts_are_chosen_by_index_and_nan_stays():
    weight, expert = gate(torch.zeros(2, 5), 3)
    assert expert.tolist() == [[0, 1, 2]] * 2 and torch.allclose(weight, torch.tensor(1 / 3))
    for found in both(CPU.permute, torch.tensor([[1.0], [2.0]]), expert, 5):
        assert found.order.tolist() == [0, 3, 1, 4, 2, 5] and found.counts_E.tolist() == [2, 2, 2, 0, 0]
        assert found.rows.flatten().tolist() == [1, 2] * 3
    weight, expert = gate(torch.full((1, 5), torch.nan), 3)
    assert weight.isnan().all() and ((0 <= expert) & (expert < 5)).all()


class Pool:
    """A pool of ``blocks`` blocks full of NaN, and rows of random lengths whose keys and values are in it."""

    def __init__(self, seed: int, heads: int, kv_heads: int, channels: int, block_size: int, rows: int):
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, 4 * block_size, (rows,), generator=draw)
        counts = -(-self.lengths // block_size)
        blocks = int(counts.sum()) + 3
        self.first = counts.cumsum(0) - counts
        self.table = torch.randperm(blocks, generator=draw)[: int(counts.sum())]
        self.q = torch.randn(rows, heads, channels, generator=draw)
        self.kv = [torch.randn(2, int(n), kv_heads, channels, generator=draw) for n in self.lengths]
        self.pool = torch.full((2 * blocks, kv_heads, block_size, channels), torch.nan)
        with torch.inference_mode():
            for row, (k, v) in enumerate(self.kv):
                t = torch.arange(len(k))
                block = self.table[self.first[row] + t // block_size]
                keys = (block * kv_heads)[:, None] + torch.arange(kv_heads)
                slots = keys * block_size + (t % block_size)[:, None]
                slots = torch.stack([slots, slots + blocks * kv_heads * block_size]).flatten()
                CPU.store_kv(self.pool, slots, k, v, None)

    def attend(self, rows: slice = slice(None), device: str = "cpu") -> torch.Tensor:
        q, first, lengths = (x[rows].contiguous().to(device) for x in (self.q, self.first, self.lengths))
        with torch.inference_mode():
            on_device = self.pool.to(device)
            rows = PagedRows(self.table.to(device), first, lengths)
            return CPU.paged_attention(q, on_device, rows, None, 1.0).cpu()

    def wanted(self) -> torch.Tensor:
        out = []
        for q, (k, v) in zip(self.q, self.kv, strict=True):
            k, v = (x.repeat_interleave(q.shape[0] // x.shape[1], 1).transpose(0, 1).double() for x in (k, v))
            scores = (k @ q.double().unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
            out.append((scores.softmax(-1).unsqueeze(1) @ v).squeeze(1))
        return torch.stack(out).float()


@given(
    seed=seeds,
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    channels=st.sampled_from([2, 8, 20, 32, 40, 64]),
    block_size=st.sampled_from([1, 4, 8, 12, 16, 32]),
    rows=st.integers(1, 6),
)
def test_attention_reads_the_tokens_of_its_row_and_nothing_else(seed, group, kv_heads, channels, block_size, rows):
    pool = Pool(seed, group * kv_heads, kv_heads, channels, block_size, rows)
    found = pool.attend()
    assert near(found, pool.wanted())
    for row in range(rows):
        assert torch.equal(pool.attend(slice(row, row + 1))[0], found[row]), "independent of the batch, to the bit"


class LatentPool:
    """As `Pool`, of latents: all heads read the same keys, whose first ``values`` channels are their values."""

    def __init__(self, seed: int, heads: int, values: int, rope: int, block_size: int, rows: int, spread: float = 1.0):
        draw = torch.Generator().manual_seed(seed)
        self.values, width = values, values + rope
        self.lengths = torch.randint(1, 5 * block_size, (rows,), generator=draw)
        counts = -(-self.lengths // block_size)
        blocks = int(counts.sum()) + 3
        self.first = counts.cumsum(0) - counts
        self.table = torch.randperm(blocks, generator=draw)[: int(counts.sum())]
        self.q = spread * torch.randn(rows, heads, width, generator=draw)
        self.latents = [torch.randn(int(n), 1, width, generator=draw) for n in self.lengths]
        self.pool = torch.full((blocks, 1, block_size, width), torch.nan)
        with torch.inference_mode():
            for row, latent in enumerate(self.latents):
                t = torch.arange(len(latent))
                slots = self.table[self.first[row] + t // block_size] * block_size + t % block_size
                CPU.store_kv(self.pool, slots, latent, None, None)

    def attend(self, rows: slice = slice(None), device: str = "cpu") -> torch.Tensor:
        q, first, lengths = (x[rows].contiguous().to(device) for x in (self.q, self.first, self.lengths))
        with torch.inference_mode():
            rows = PagedRows(self.table.to(device), first, lengths)
            return CPU.paged_attention(q, self.pool.to(device), rows, self.values, 0.3).cpu()

    def wanted(self) -> torch.Tensor:
        out = []
        for q, latent in zip(self.q.double(), self.latents, strict=True):
            scores = q @ latent[:, 0].double().T * 0.3
            out.append(scores.softmax(-1) @ latent[:, 0, : self.values].double())
        return torch.stack(out).float()


@given(
    seed=seeds,
    heads=st.integers(1, 5),
    values=st.sampled_from([1, 6, 8, 16, 40, 64]),
    rope=st.sampled_from([2, 4, 8, 16]),
    block_size=st.sampled_from([1, 4, 8, 12, 16, 32]),
    rows=st.integers(1, 6),
    spread=st.sampled_from([1.0, 30.0]),
)
def test_latent_attention_reads_the_tokens_of_its_row_and_nothing_else(
    seed, heads, values, rope, block_size, rows, spread
):
    """Also where the scores of later blocks are far larger than those of the first."""
    pool = LatentPool(seed, heads, values, rope, block_size, rows, spread)
    found = pool.attend()
    assert torch.allclose(found, pool.wanted(), rtol=1e-5, atol=1e-5 * spread)
    for row in range(rows):
        assert torch.equal(pool.attend(slice(row, row + 1))[0], found[row]), "independent of the batch, to the bit"


def test_latent_attention_of_nan_is_nan_from_any_token():
    for token in range(20):
        pool = LatentPool(0, heads=2, values=8, rope=4, block_size=4, rows=3)
        row, length = int(pool.lengths.argmax()), int(pool.lengths.max())
        block = pool.table[pool.first[row] + token % length // 4]
        pool.pool[block, 0, token % length % 4, 9] = torch.nan  # of its key only
        assert pool.attend()[row].isnan().all()


def test_the_rows_of_all_operators_are_independent_to_the_bit(tmp_path):
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 72, generator=draw), torch.randn(72, generator=draw)
    logits = torch.randn(9, 24, generator=draw)
    with torch.inference_mode():
        normed, gated = CPU.rms_norm(x, weight, 1e-6), CPU.swiglu(x)
        for row in range(9):
            one = slice(row, row + 1)
            assert torch.equal(CPU.rms_norm(x[one], weight, 1e-6), normed[one])
            assert torch.equal(CPU.swiglu(x[one]), gated[one])
            for alone, together in zip(gate(logits[one], 4), gate(logits, 4), strict=True):
                assert torch.equal(alone, together[one])


def test_an_emulated_card_computes_the_same_bits_in_its_own_memory(card):
    device = card.torch_device
    x, weight = torch.randn(5, 64), torch.randn(64)
    pool = Pool(0, heads=4, kv_heads=2, channels=32, block_size=16, rows=5)
    with torch.inference_mode():
        on_card = CPU.rms_norm(x.to(device), weight.to(device), 1e-6)
        assert on_card.device == device and card.memory().allocated >= on_card.nbytes
        assert torch.equal(on_card.cpu(), CPU.rms_norm(x, weight, 1e-6))
    assert torch.equal(pool.attend(device=device), pool.attend())
    latents = LatentPool(0, heads=4, values=16, rope=8, block_size=16, rows=5)
    assert torch.equal(latents.attend(device=device), latents.attend())


def test_what_does_not_fit_is_refused():
    pool = Pool(0, heads=2, kv_heads=1, channels=8, block_size=4, rows=2)
    with torch.inference_mode():
        for table, first, lengths in (
            (pool.table + 100, pool.first, pool.lengths),
            (pool.table, pool.first + 100, pool.lengths),
            (pool.table, pool.first, pool.lengths * 0),
        ):
            with pytest.raises(IndexError):
                CPU.paged_attention(pool.q, pool.pool, PagedRows(table, first, lengths), None, 1.0)
        k = torch.zeros(1, 1, 8)
        with pytest.raises(IndexError, match="slot"):
            CPU.store_kv(pool.pool, torch.tensor([0, 1 << 40]), k, k, None)
        with pytest.raises(RuntimeError, match="slots do not match"):
            CPU.store_kv(pool.pool, torch.tensor([0, 1]), k, None, None)
        one = PagedRows(torch.tensor([0]), torch.tensor([0]), torch.tensor([1]))
        for pool_shape, values in (((2, 1, 4, 8), 9), ((2, 2, 4, 8), 4), ((2, 1, 4, 6), 4)):
            with pytest.raises(RuntimeError, match="do not match the pool's"):
                CPU.paged_attention(torch.zeros(1, 2, 8), torch.zeros(pool_shape), one, values, 1.0)
        with pytest.raises(RuntimeError, match="counts for 3 rows"):
            CPU.experts(torch.zeros(2, 4), torch.tensor([3]), ([torch.zeros(8, 4)], [torch.zeros(4, 4)]), 1)


def test_only_generation_in_float32_on_the_host_is_fused():
    with torch.no_grad():
        assert not CPU.takes_counts(torch.zeros(1), 1), "a trainer's pass without gradients rounds as one with them"
    with torch.inference_mode():
        assert CPU.takes_counts(torch.zeros(1), 1) and not CPU.takes_counts(torch.zeros(1, dtype=torch.bfloat16), 1)
        assert CPU.reads_blocks(torch.float32) and not CPU.reads_blocks(torch.bfloat16)
    fused = "cuda_fused" if find_spec("triton") else "cuda"
    assert (operators_of("npu").name, operators_of("cuda").name) == ("ascend", fused)


def composed() -> None:
    with torch.inference_mode():
        for _ in range(2):
            print(operators_of("ledger").rms_norm(torch.full((1, 2), 3.0), torch.tensor([1.0, 2.0]), 0.0))


def test_without_a_compiler_the_same_functions_are_composed(tmp_path):
    output, errors = in_fork(composed, XDG_CACHE_HOME=str(tmp_path), PATH=str(tmp_path))
    assert output == 2 * "tensor([[1., 2.]])\n"
    assert errors.count("no fused operators (no C++ compiler found (install g++))") == 1
