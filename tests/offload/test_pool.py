"""The invariants of `fusion/offload/pool.py`."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.offload import HostPool
from fusion.offload.pool import ALIGN
from tests.offload.memory import free_bytes

sizes = st.lists(st.integers(1, 20_000), min_size=1, max_size=12)


def spans(regions: list[torch.Tensor]) -> list[tuple[int, int]]:
    return sorted((region.data_ptr(), region.data_ptr() + region.numel()) for region in regions)


@settings(max_examples=50)
@given(st.lists(st.tuples(sizes, st.integers(0, 11)), min_size=1, max_size=8))
def test_regions_never_overlap_and_come_from_what_the_pool_holds(device, batches):
    pool, out, held = HostPool(device), [], 0
    for batch, give_back in batches:
        fits, before = pool.fits(batch), (pool.nbytes, free_bytes(pool))
        assert (pool.nbytes, free_bytes(pool)) == before
        out += zip(pool.take(batch), batch, strict=True)
        assert fits == (pool.nbytes == held), "it grows only where it must"
        assert all(region.numel() == size and region.dtype == torch.uint8 for region, size in out)
        bounds = spans([region for region, _ in out])
        assert all(stop <= start for (_, stop), (start, _) in zip(bounds, bounds[1:], strict=False))
        used = sum(size + -size % ALIGN for _, size in out)
        assert pool.nbytes == used + free_bytes(pool), "every byte is out or free"
        assert pool.nbytes >= held, "it never shrinks"
        held = pool.nbytes
        pool.give([region for region, _ in out[:give_back]])
        out = out[give_back:]
    pool.give([region for region, _ in out])
    assert free_bytes(pool) == pool.nbytes == held
    assert all(len(gaps) == 1 for gaps in pool._free), "neighbours merge"


@settings(max_examples=50)
@given(sizes)
def test_a_batch_takes_less_than_twice_its_bytes_and_lies_at_the_same_place_again(device, batch):
    pool = HostPool(device)
    regions = pool.take(batch)
    assert all(arena.numel().bit_count() == 1 for arena in pool._arenas)
    assert pool.nbytes < 2 * sum(size + -size % ALIGN for size in batch)
    pool.give(regions)
    held, places = pool.nbytes, [region.data_ptr() for region in regions]
    assert [region.data_ptr() for region in pool.take(batch)] == places and pool.nbytes == held


def test_many_regions_of_a_size_that_is_no_power_of_two_waste_little(device):
    """One power of two a region would waste a third."""
    size = 768 << 10
    pool = HostPool(device)
    pool.take([size] * 64)
    assert 64 * size <= pool.nbytes <= 1.05 * 64 * size


def test_the_pool_is_pinned_and_not_memory_of_the_card(device):
    before = device.memory().allocated
    (region,) = HostPool(device).take([1 << 20])
    assert device.memory().allocated == before and region.device.type == "cpu" and region.is_pinned()
