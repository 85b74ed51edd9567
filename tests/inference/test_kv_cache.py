"""Blocks copied between the card and the host: to the bit, at any places, and no other block is touched."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from fusion.inference.kv_cache import MAX_RUNS, KVCache
from fusion.inference.kv_layout import KVLayout
from tests.inference.engines import card

BLOCKS, SIZE = 40, 4


@pytest.mark.parametrize("layout", [KVLayout(2, 3, 8, 8), KVLayout(1, 1, 24, 16)], ids=["keys and values", "latents"])
@given(data=st.data())
def test_blocks_go_to_the_host_and_back_to_other_places(layout, data):
    cache = KVCache(layout, layers=2, block_size=SIZE, device=card(), dtype=torch.float32)
    cache.allocate(BLOCKS, BLOCKS * SIZE)
    for pool in cache.pools:
        pool.copy_(torch.randn(pool.shape))
    before = [pool.cpu() for pool in cache.pools]
    places = st.permutations(range(BLOCKS))
    out_of = data.draw(places)[: data.draw(st.integers(1, 3 * MAX_RUNS))]
    first = data.draw(st.integers(0, len(out_of) - 1))
    into = data.draw(st.sampled_from([sorted, list]))(data.draw(places)[: len(out_of) - first])
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, BLOCKS - len(into)))
        into = list(range(start, start + len(into)))
    host = torch.empty(cache.host_shape(len(out_of)))
    cache.copy_out(out_of, host)
    cache.copy_in(host, first, into)
    card().synchronize()
    for pool, old in zip(cache.pools, before, strict=True):
        expected = old.clone().unflatten(0, (layout.parts, BLOCKS))
        expected[:, into] = old.unflatten(0, (layout.parts, BLOCKS))[:, out_of[first:]]
        assert torch.equal(pool.cpu(), expected.flatten(0, 1))
    cache.release()
