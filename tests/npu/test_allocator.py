"""The allocator of the emulated card: rounding, pools, splitting, merging and giving back, as on a real one.

Segments are 512 times smaller than a real card's: 4 KiB in the small pool, 40 KiB in the large one.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.npu import open_device

KIB, MIB = 1 << 10, 1 << 20
CARD, SMALL, LARGE = 128 * MIB, 4 * KIB, 40 * KIB


def _card(capacity_bytes=CARD):
    device = open_device("emulated", index=11, capacity_bytes=capacity_bytes)
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    assert device.memory().allocated == 0
    device.empty_cache()
    device.reset_peak()
    assert device.memory().reserved == 0
    return device


@pytest.fixture
def device():
    yield _card()
    torch.npu.set_device(0)


def _take(device, nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)


def test_blocks_are_rounded_to_512_bytes_and_small_ones_share_a_segment(device):
    tensors = [_take(device, nbytes) for nbytes in (1, 512, 513)]
    memory = device.memory()
    assert (memory.requested, memory.allocated, memory.reserved) == (1026, 2048, SMALL)
    assert tensors[1].data_ptr() - tensors[0].data_ptr() == 512
    assert memory.fragmented == 2048, "free, but in a page with others"
    del tensors
    memory = device.memory()
    assert (memory.allocated, memory.reserved, memory.fragmented) == (0, SMALL, 0), "kept for the next"


def test_small_and_large_requests_have_pools_of_their_own(device):
    small, large = _take(device, 2 * KIB), _take(device, 2 * KIB + 1)
    assert device.memory().reserved == SMALL + LARGE
    del small
    again = _take(device, 3 * KIB)
    assert device.memory().reserved == SMALL + LARGE, "from the rest of the large segment"
    del large, again


def test_large_requests_take_page_by_page(device):
    tensors, reserved = [], []
    for size in (11 * KIB, 18 * KIB, 21 * KIB):
        tensors.append(_take(device, size))
        reserved.append(device.memory().reserved)
    assert reserved == [LARGE, LARGE, 2 * LARGE]


def test_a_freed_block_is_used_again_and_best_fit_chooses_it(device):
    sizes = [200 * KIB, 100 * KIB, 300 * KIB]
    tensors = [_take(device, size) for size in sizes]
    walls = [_take(device, 50 * KIB)]
    places = [tensor.data_ptr() for tensor in tensors]
    reserved = device.memory().reserved
    del tensors[1]
    assert _take(device, 90 * KIB).data_ptr() == places[1]
    del tensors
    assert _take(device, 600 * KIB).data_ptr() == places[0], "free neighbours are one block"
    assert device.memory().reserved == reserved
    del walls


def test_holes_serve_a_large_block_again(device):
    """Blocks of 1 MiB with a small one between each pair: freed, they are 64 MiB in pieces of 1 MiB."""
    kept = []
    for _ in range(64):
        large, between = _take(device, MIB), _take(device, 8 * KIB)
        kept.append((large, between))
    kept = [between for _, between in kept]
    large = between = None
    assert device.memory().allocated == 64 * 8 * KIB
    assert device.memory().free > CARD - 64 * 2 * LARGE
    assert _take(device, 100 * MIB).numel() == 100 * MIB
    del kept, large, between


def test_cached_segments_are_released_before_giving_up(device):
    tensors = [_take(device, 10 * MIB) for _ in range(12)]
    del tensors[::2]
    assert device.memory().reserved >= 120 * MIB
    assert device.memory().free == pytest.approx(68 * MIB, abs=2 * LARGE)
    big = _take(device, device.memory().free)
    with pytest.raises(torch.OutOfMemoryError):
        _take(device, MIB)
    assert device.memory().reserved <= CARD
    del tensors, big
    device.empty_cache()
    assert device.memory().reserved == 0
    assert _take(device, device.memory().free).numel() >= CARD - LARGE


def test_a_stream_has_pools_of_its_own(device):
    held = _take(device, 100 * KIB)
    place = held.data_ptr()
    del held
    side = device.new_stream()
    with device.on_stream(side):
        other = _take(device, 100 * KIB)
    assert other.data_ptr() != place and device.memory().reserved >= 200 * KIB
    assert _take(device, 100 * KIB).data_ptr() == place
    other.record_stream(device.current_stream())
    del other


def test_outputs_of_kernels_come_from_the_same_pools(device):
    x = _take(device, 100 * KIB).zero_()
    y = x + 1
    place = y.data_ptr()
    reserved = device.memory().reserved
    del y
    for _ in range(3):
        y = x * 2
        assert y.data_ptr() == place
        del y
    assert device.memory().reserved == reserved


def test_statistics_are_those_of_torch(device):
    tensors = [_take(device, 600) for _ in range(3)]
    stats = torch.npu.memory_stats(11)
    assert stats["requested_bytes.all.current"] == 1800
    assert stats["allocated_bytes.all.current"] == 3 * 1024
    assert stats["reserved_bytes.all.current"] == stats["segment.all.current"] * SMALL == SMALL
    assert stats["inactive_split_bytes.all.current"] == 1024
    assert torch.npu.memory_reserved(11) == SMALL
    assert stats["requested_bytes.all.current"] == 1800
    del tensors
    assert torch.npu.memory_stats(11)["allocated_bytes.all.peak"] == 3 * 1024


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 200 * KIB) | st.integers(1, 4 * KIB), st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 1 << 30)),
        st.tuples(st.just("empty")),
    ),
    max_size=60,
)


@given(actions=ACTIONS)
@settings(max_examples=40)
def test_any_order_of_allocations_keeps_the_account(actions):
    """Live blocks never overlap; allocated is their sum, rounded; reserved covers it and stays inside the card; `free`
    can be had; and in the end everything comes back."""
    device = _card(8 * MIB)
    streams = [device.current_stream(), device.new_stream(), device.new_stream()]
    live: list[tuple[torch.Tensor, int]] = []
    for stamp, (action, *values) in enumerate(actions):
        if action == "take":
            with device.on_stream(streams[values[1]]):
                live.append((_take(device, values[0]).fill_(stamp), stamp))
        elif action == "free" and live:
            del live[values[0] % len(live)]
        elif action == "empty":
            device.empty_cache()
            assert device.memory().reserved == device.memory().allocated + device.memory().fragmented
        memory = device.memory()
        assert memory.requested == sum(tensor.nbytes for tensor, _ in live)
        assert memory.allocated == sum(-(-tensor.nbytes // 512) * 512 for tensor, _ in live)
        assert memory.allocated + memory.fragmented <= memory.reserved <= 8 * MIB
    most = _take(device, device.memory().free).fill_(255) if device.memory().free else None
    for tensor, stamp in live:
        assert tensor.cpu().eq(stamp).all()
    del live, most
    tensor = None  # the loop's
    device.empty_cache()
    assert (device.memory().reserved, device.memory().allocated) == (0, 0)
