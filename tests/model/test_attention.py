"""Latents expanded to heads and latents attended to by absorbed queries are the same attention, for any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fusion.model import PackedAttention, Up, local_params
from fusion.model.matrix import Matrix
from fusion.model.parallel import Parallel
from fusion.model.spec import Latent, Rotary
from fusion.npu.operators import BATCH_INVARIANT_ROWS, Plain
from tests.families import MLA, family_config


def spec_of(heads: int, rank: int, nope: int, rope: int, value: int) -> Latent:
    return Latent(heads, rank, nope, rope, value, Rotary(rope), None, softmax_scale=0.2)


def matrix(spec: Latent, heads_of_block: int) -> Matrix:
    channels = spec.nope_dim + spec.value_dim
    whole = torch.randn(spec.num_heads * channels, spec.kv_rank, dtype=torch.float64)
    if heads_of_block == spec.num_heads:
        return nn.Parameter(whole)
    return nn.ParameterList(whole.split(heads_of_block * channels))


@given(
    spec=st.builds(
        spec_of,
        heads=st.sampled_from([2, 4]),
        rank=st.integers(1, 6),
        nope=st.integers(1, 5),
        rope=st.sampled_from([2, 4]),
        value=st.integers(1, 9),
    ),
    heads_of_block=st.sampled_from([1, 2]),
    rows=st.integers(1, 20),
    row_multiple=st.sampled_from([1, BATCH_INVARIANT_ROWS]),
    seed=st.integers(0, 99),
)
def test_absorbed_queries_attend_as_expanded_keys_do(
    spec: Latent, heads_of_block: int, rows: int, row_multiple: int, seed: int
) -> None:
    torch.manual_seed(seed)
    up = Up(matrix(spec, heads_of_block), spec, Plain(), row_multiple)
    q = torch.randn(rows, spec.num_heads, spec.head_dim, dtype=torch.float64).split([spec.nope_dim, spec.rope_dim], -1)
    latent = torch.randn(rows, spec.cached_width, dtype=torch.float64)
    wanted = PackedAttention([rows], Plain()).latent(0, q, latent.split([spec.kv_rank, spec.rope_dim], -1), up)
    absorbed = torch.cat([up.absorb(q[0]), q[1]], dim=-1)
    scores = torch.einsum("nhl,ml->hnm", absorbed, latent) * up.softmax_scale
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    attended = torch.einsum("hnm,mr->nhr", weights, latent[:, : spec.kv_rank])
    torch.testing.assert_close(up.values(attended), wanted, atol=1e-12, rtol=1e-12)
    assert wanted.shape == (rows, spec.num_heads, spec.value_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    spec = spec_of(heads=4, rank=64, nope=24, rope=8, value=40)
    kv_b = nn.Parameter(torch.randn(4 * 64, 64, dtype=dtype))
    up = Up(kv_b, spec, Plain(), BATCH_INVARIANT_ROWS)
    q, latent = torch.randn(100, 4, 24, dtype=dtype), torch.randn(100, 72, dtype=dtype).split([64, 8], dim=-1)
    attended = torch.randn(100, 4, 64, dtype=dtype)
    wanted = [up.absorb(q), up.values(attended), *up.expand(*latent)]
    for rows in (1, 7, 16, 33):
        found = [up.absorb(q[:rows]), up.values(attended[:rows]), *up.expand(*(x[:rows] for x in latent))]
        assert all(torch.equal(one, other[:rows]) for one, other in zip(found, wanted, strict=True))


def test_interleaved_pairs_are_turned_by_the_angle_of_their_frequency() -> None:
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    angles = torch.rand(3, 1, 3, dtype=torch.float64)
    cos = angles.cos().repeat_interleave(2, dim=-1)
    sin = torch.stack([-angles.sin(), angles.sin()], dim=-1).flatten(-2)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(Plain().rotate(x, (cos, sin), interleaved=True), torch.view_as_real(turned).flatten(-2))
    halves = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
    rope = torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)
    torch.testing.assert_close(Plain().rotate(halves, rope), torch.cat([turned.real, turned.imag], dim=-1))


@pytest.mark.parametrize("kind", MLA)
def test_kv_b_is_cut_only_between_heads(kind: str) -> None:
    """Even where a head is larger than a storage unit."""
    config = family_config(kind)
    attention = config.attention
    assert isinstance(attention, Latent)
    channels = attention.nope_dim + attention.value_dim
    for max_numel in (10, channels * attention.kv_rank, 3 * channels * attention.kv_rank - 1):
        blocks = [
            param
            for param in local_params(config, Parallel(2, tp=2), 1, max_numel)
            if param.name.startswith("layers.0.attention.kv_b")
        ]
        assert len(blocks) == (1 if max_numel > 2 * channels * attention.kv_rank else 2)
        assert all(param.shape[0] % channels == 0 for param in blocks)
        assert sum(param.shape[0] for param in blocks) == channels * attention.num_heads // 2
