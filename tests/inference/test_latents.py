"""Attention over cached latents is that over the keys and values they expand to, whatever a step computes."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion.costmodel.shape import Shape
from fusion.inference import Request, SamplingParams
from fusion.inference.attention import PagedAttention
from fusion.inference.batch import SHORT_CHUNK_TOKENS, plan_batch
from fusion.inference.kv_cache import KVCache
from fusion.inference.kv_layout import KVLayout
from fusion.inference.sequence import EngineStep, Sequence
from fusion.model import ModelConfig, Up
from fusion.model.spec import Latent, Rotary
from fusion.npu.operators import BATCH_INVARIANT_ROWS, Plain, composed_attention, cuda, operators_of
from tests.inference.engines import card
from tests.npu.test_cuda_operators import reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card"),
    pytest.mark.filterwarnings("ignore:.*composed of other operators"),
]
SHAPES = Path(__file__).parents[2] / "recipes/shapes"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 0.1}


@pytest.fixture(params=["fused", "composed", "ascend", "cuda"])
def operators(request, monkeypatch):
    """Runs a test with the host's fused operators, without these, and with the tables of cards."""
    if request.param in ("ascend", "cuda"):
        monkeypatch.setattr(card(), "operators", operators_of("emulated", request.param))
        monkeypatch.setattr(cuda, "varlen_attn", reference)
    elif request.param == "composed":
        monkeypatch.setattr("fusion.npu.operators.cpu.load", lambda: None)
        monkeypatch.setattr(composed_attention, "MAX_GATHERED_TOKENS", 100)  # rows are gathered in several pieces


class Case:
    """Sequences of random lengths: a query and a latent per token, and one layer's cache of latents."""

    def __init__(self, seed: int, *, dtype: torch.dtype, block_size: int, count: int):
        draw = torch.Generator().manual_seed(seed)

        def one_of(*values: int) -> int:
            return values[int(torch.randint(len(values), (), generator=draw))]

        self.dtype, self.draw = dtype, draw
        heads, nope, rope, rank = one_of(1, 2, 4), one_of(4, 8, 12), one_of(2, 4, 8), one_of(4, 8, 24, 32)
        self.lengths = [one_of(1, 2, 5, 17, 40, 70) for _ in range(count)]
        value = one_of(2, 8, 12)
        spec = Latent(heads, rank, nope, rope, value, Rotary(rope), None, softmax_scale=0.4 * rank**-0.5)
        kv_b = torch.randn(heads * (nope + value), rank, generator=draw, dtype=torch.float64).to(dtype)
        self.up = Up(torch.nn.Parameter(kv_b.to(card().torch_device)), spec, card().operators, BATCH_INVARIANT_ROWS)
        self.layout = KVLayout.of(spec, tp=1)
        self.widths = [rank, rope]
        total = sum(self.lengths)
        self.q = torch.randn(total, heads, nope + rope, generator=draw, dtype=torch.float64).to(dtype)
        self.latents = torch.randn(total, rank + rope, generator=draw, dtype=torch.float64).to(dtype)
        self.q, self.latents = self.q.to(card().torch_device), self.latents.to(card().torch_device)
        self.cache = KVCache(self.layout, layers=1, block_size=block_size, device=card(), dtype=dtype)
        needed = [-(-length // block_size) for length in self.lengths]
        self.cache.allocate(sum(needed) + 2, max_length=max(self.lengths))
        self.cache.clean(sum(needed) + 1)
        order = torch.randperm(sum(needed) + 2, generator=draw).tolist()
        self.sequences, ids = [], list(range(total))
        for i, length in enumerate(self.lengths):
            sequence = Sequence.of(Request(f"r{i}", tuple(ids[:length])), SamplingParams(), ())
            sequence.blocks, order, ids = array("q", order[: needed[i]]), order[needed[i] :], ids[length:]
            self.sequences.append(sequence)

    def attend(self, invariant: bool) -> torch.Tensor:
        """Returns the attention of all tokens, computed in random pieces, of several sequences in a step."""
        out = torch.full((*self.q.shape[:2], self.up.spec.value_dim), torch.nan, dtype=self.dtype)
        while unfinished := [one for one in self.sequences if one.computed < len(one.request.prompt)]:
            decodes, chunks = [], []
            for one in unfinished:
                left = len(one.request.prompt) - one.computed
                count = min(left, int(torch.randint(0, 2 * SHORT_CHUNK_TOKENS + 8, (), generator=self.draw)))
                one.tokens = list(one.request.prompt[: one.computed + count])
                if count == 1 and one.computed:
                    decodes.append(one)
                elif count:
                    chunks.append((one, count))
            if decodes or chunks:
                with torch.inference_mode():
                    batch = plan_batch(EngineStep(decodes, chunks, []), self.cache, invariant).send(self.cache.device)
                    attend = PagedAttention(self.cache, batch)
                    spec, q, latents = self.up.spec, self.q[batch.ids], self.latents[batch.ids]
                    q, latents = q.split([spec.nope_dim, spec.rope_dim], -1), latents.split(self.widths, -1)
                    got = attend.latent(0, q, latents, self.up)
                out[batch.ids.cpu()] = got.cpu()
            for one in (*decodes, *(one for one, _ in chunks)):
                one.computed = len(one.tokens)
        for one in self.sequences:
            one.computed = 0
        return out

    def wanted(self) -> torch.Tensor:
        """Returns the attention over expanded keys and values of whole sequences, in float64."""
        scale, kv_b = self.up.softmax_scale, torch.nn.Parameter(self.up.kv_b.double())
        keys, values = Up(kv_b, self.up.spec, Plain()).expand(*self.latents.double().split(self.widths, dim=-1))
        return Plain().varlen_attention(self.q.double(), keys, values, self.lengths, scale).detach().cpu()


def close(case: Case, found: torch.Tensor) -> bool:
    """Whether it is what `Case.wanted` returns, relative to its largest value."""
    wanted = case.wanted()
    return bool((found.double() - wanted).abs().max() <= TOLERANCE[case.dtype] * max(1.0, float(wanted.abs().max())))


@given(
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from(list(TOLERANCE)),
    block_size=st.sampled_from([4, 8, 16]),
    count=st.integers(1, 5),
    invariant=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_any_pieces_are_attended_as_expanded(operators, seed, dtype, block_size, count, invariant):
    case = Case(seed, dtype=dtype, block_size=block_size, count=count)
    assert close(case, case.attend(invariant))


@pytest.mark.parametrize("max_scores", [1, 200])
def test_absorbed_chunks_are_attended_some_rows_at_a_time(monkeypatch, max_scores):
    monkeypatch.setattr("fusion.inference.attention.MAX_SCORES", max_scores)
    monkeypatch.setattr(KVLayout, "absorbs", lambda *_, head_dim: True)
    case = Case(1, dtype=torch.float64, block_size=8, count=5)
    assert close(case, case.attend(invariant=False))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_attention_is_bitwise_the_same_in_any_pieces_where_it_is_batch_invariant(operators, dtype):
    case = Case(3, dtype=dtype, block_size=8, count=5)
    first = case.attend(invariant=True)
    for _ in range(4):
        assert torch.equal(case.attend(invariant=True), first)


def test_latents_kept_apart_are_copied_as_those_that_are_joined(monkeypatch):
    """Blocks on the host have one shape for all tables: an engine continues what one with another table has parked."""
    hosts, draw = [], torch.Generator().manual_seed(0)
    rows = torch.randn(12, 24, generator=draw).to(card().torch_device).split([16, 8], dim=-1)
    for name in ("plain", "ascend"):
        monkeypatch.setattr(card(), "operators", operators_of("emulated", name))
        cache = KVCache(KVLayout(1, 1, 24, 16), layers=1, block_size=4, device=card(), dtype=torch.float32)
        cache.allocate(7, 12)
        cache.clean(6)
        slots = torch.arange(12, device=card().torch_device) + 8  # blocks 2, 3 and 4
        card().operators.store_latents(cache.pools[0], slots, *rows, None)
        cache.copy([(2, 6)])
        host = torch.zeros(cache.host_shape(4))
        cache.copy_out([6, 3, 4, 1], host)
        cache.copy_in(host, 1, [0, 5])
        again = cache.gather(cache.pools[0], torch.tensor([0, 5], device=card().torch_device)).cpu()
        assert torch.equal(again, host[0, 1:3])
        hosts.append(host)
        cache.release()
    assert torch.equal(*hosts) and torch.equal(hosts[0][0, :3].flatten(0, 2), torch.cat(rows, dim=-1).cpu())
    assert not hosts[0][0, 3].any()


rows = st.integers(1, 4096)
tokens = st.integers(1, 1 << 17)
width = st.sampled_from([(192, 576, 512), (24, 40, 32), (96, 288, 256)])


@given(rows=rows, more=st.integers(0, 4096), tokens=tokens, width=width)
def test_few_rows_absorb_and_many_expand(rows, more, tokens, width):
    """A row alone absorbs behind a prompt of any length; whole prompts expand; more rows never absorb where fewer do
    not."""
    head_dim, latent, values = width
    layout = KVLayout(1, 1, width=latent, value_width=values)
    assert layout.absorbs(1, tokens + 1, head_dim)
    assert not layout.absorbs(rows, rows, head_dim)
    total = tokens + rows + more
    assert layout.absorbs(rows, total, head_dim) >= layout.absorbs(rows + more, total, head_dim)


def test_a_latent_of_one_token_takes_its_width_in_each_layer_and_keys_and_values_twice_theirs():
    latents, heads = KVLayout(1, 1, width=576, value_width=512), KVLayout(2, 4, width=128, value_width=128)
    assert latents.elements == 576 and heads.elements == 2 * 4 * 128
    assert latents.pool_shape(7, 16) == (7, 1, 16, 576) and heads.pool_shape(7, 16) == (14, 4, 16, 128)


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("name", ["deepseek_r1_671b", "kimi_k2", "moonlight_16b_a3b", "pangu_718b", "qwen3_235b_a22b"])
def test_a_block_of_a_published_model_takes_the_bytes_of_the_cost_model(name, tp):
    fields = yaml.safe_load((SHAPES / f"{name}.yaml").read_text())["config"]
    config = ModelConfig.from_hf(fields)
    layout = KVLayout.of(config.attention, tp)
    cache = KVCache(layout, layers=config.num_layers, block_size=16, device=card(), dtype=torch.bfloat16)
    assert cache.block_bytes == 16 * Shape(name, config).kv_bytes(tp)
    assert layout.is_latent == (name != "qwen3_235b_a22b")
