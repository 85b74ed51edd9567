"""Private pools of memory, raw blocks and snapshots of the emulated card's allocator."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.npu import open_device
from fusion.npu.compiler import compiler

KIB, MIB = 1 << 10, 1 << 20
INDEX, CARD, LARGE = 12, 8 * MIB, 40 * KIB


@pytest.fixture(params=["expandable", "fixed"])
def device(request):
    device = open_device("emulated", index=INDEX, capacity_bytes=CARD, segments=request.param)
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    device.empty_cache()
    device.reset_peak()
    assert (device.memory().allocated, device.memory().reserved) == (0, 0)
    yield device
    torch.npu.set_device(0)


def _take(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device=f"npu:{INDEX}")


def _segment_of(tensor):
    address = tensor.data_ptr()
    (found,) = (one for one in torch.npu.memory_snapshot() if 0 <= address - one["address"] < one["total_size"])
    return found


def test_a_pool_shares_no_segment_with_other_allocations(device):
    pool, other = torch.npu.MemPool(), torch.npu.MemPool()
    assert pool.id != other.id and torch.npu.graph_pool_handle() not in (pool.id, other.id)
    with torch.npu.use_mem_pool(pool):
        assert pool.use_count() == 2
        inside = _take(4 * KIB)
        with torch.npu.use_mem_pool(other):
            innermost = _take(4 * KIB)
        again = _take(4 * KIB)
    outside = _take(4 * KIB)
    assert pool.use_count() == 1
    owners = [_segment_of(one)["segment_pool_id"] for one in (inside, innermost, again, outside)]
    assert owners == [pool.id, other.id, pool.id, (0, 0)]
    assert device.memory().reserved == 3 * LARGE
    assert pool.snapshot() == [_segment_of(inside)]


def test_outputs_of_operators_come_from_the_pool(device):
    pool = torch.npu.MemPool()
    x = torch.ones(2000, device=device.torch_device)
    with torch.npu.use_mem_pool(pool):
        y = x * 2
    assert _segment_of(y)["segment_pool_id"] == pool.id and _segment_of(x)["segment_pool_id"] == (0, 0)


def test_a_pool_keeps_its_free_memory_until_it_is_gone(device):
    pool = torch.npu.MemPool()
    with torch.npu.use_mem_pool(pool):
        kept, freed = _take(LARGE), _take(LARGE)
    address = freed.data_ptr()
    del freed
    device.empty_cache()
    assert device.memory().reserved == 2 * LARGE
    assert _take(LARGE).data_ptr() != address, "not reused by another pool"
    with torch.npu.use_mem_pool(pool):
        assert _take(LARGE).data_ptr() == address, "reused by its own"
    device.empty_cache()
    del pool
    assert device.memory().reserved == LARGE, "what is free returns at once"
    del kept
    device.empty_cache()
    assert device.memory().reserved == 0 and torch.npu.memory_snapshot() == []


@pytest.mark.parametrize("use_on_oom", [False, True])
def test_a_pool_helps_others_on_a_full_card_only_if_it_says_so(device, use_on_oom):
    pool = torch.npu.MemPool(use_on_oom=use_on_oom)
    with torch.npu.use_mem_pool(pool):
        freed = _take(100 * LARGE)
    del freed
    filling = _take(100 * LARGE)
    assert _segment_of(filling)["segment_pool_id"] == (0, 0)
    if use_on_oom:
        assert _segment_of(_take(10 * LARGE))["segment_pool_id"] == pool.id
    else:
        with pytest.raises(torch.OutOfMemoryError):
            _take(10 * LARGE)


def test_a_pool_may_not_split(device):
    pool = torch.npu.MemPool(no_split=True)
    with torch.npu.use_mem_pool(pool):
        tensors = [_take(4 * KIB) for _ in range(3)]
    segments = {_segment_of(one)["address"] for one in tensors}
    assert len(segments) == 3 and all(len(one["blocks"]) == 1 for one in pool.snapshot())


LIBRARY = """
#include <cstdlib>
#include <sys/types.h>
static long provided = 0, calls = 0;
extern "C" void* provide(ssize_t bytes, int device, void* stream) {
  if (device != 12 || bytes > (1 << 20)) return nullptr;
  ++calls;
  provided += bytes;
  return std::aligned_alloc(4096, bytes);
}
extern "C" void release(void* memory, size_t bytes, void* stream) {
  provided -= bytes;
  std::free(memory);
}
extern "C" long bytes_provided() { return provided; }
extern "C" long num_calls() { return calls; }
"""


def test_functions_of_a_library_provide_the_memory_of_a_pool(device, tmp_path):
    library = tmp_path / "provider.so"
    (tmp_path / "provider.cpp").write_text(LIBRARY)
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", str(library), str(tmp_path / "provider.cpp")], check=True)
    functions = ctypes.CDLL(str(library))
    allocator = torch.npu.NPUPluggableAllocator(str(library), "provide", "release")
    pool = torch.npu.MemPool(allocator.allocator())
    with torch.npu.use_mem_pool(pool):
        x = torch.arange(3000, device=device.torch_device)
        assert x.sum().item() == 3000 * 2999 // 2
        provided = functions.bytes_provided()
        assert provided == sum(one["total_size"] for one in pool.snapshot()) == device.memory().reserved
        with pytest.raises(torch.OutOfMemoryError):
            _take(2 * MIB)
    calls = functions.num_calls()
    y = torch.arange(3000, device=device.torch_device)
    assert functions.num_calls() == calls, "other allocations do not ask it"
    del x, pool
    assert functions.bytes_provided() == 0
    del y
    with pytest.raises(AttributeError):
        torch.npu.NPUPluggableAllocator(str(library), "provide", "missing")


def test_raw_blocks_are_counted_and_freed_by_address(device):
    stream = torch.npu.Stream()
    address = torch.npu.caching_allocator_alloc(10_000, INDEX, stream)
    number = torch.npu.caching_allocator_alloc(600, INDEX, stream.npu_stream)
    assert device.memory().allocated == 10_240 + 1024
    by_address = {block["address"]: one["stream"] for one in torch.npu.memory_snapshot() for block in one["blocks"]}
    assert by_address[address] == by_address[number] == stream.npu_stream != 0
    ctypes.memset(address, 1, 10_000)
    torch.npu.caching_allocator_delete(address)
    torch.npu.caching_allocator_delete(number)
    assert device.memory().allocated == 0
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        torch.npu.caching_allocator_delete(address)
    with pytest.raises(TypeError, match="stream argument"):
        torch.npu.caching_allocator_alloc(1, INDEX, "stream")
    with pytest.raises(torch.OutOfMemoryError):
        torch.npu.caching_allocator_alloc(CARD + 1, INDEX)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300 * KIB), st.booleans()), max_size=25))
def test_a_snapshot_adds_up_to_the_statistics(steps):
    device = open_device("emulated", index=INDEX + 1, capacity_bytes=64 * MIB)
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    pools, held = [torch.npu.MemPool(), torch.npu.MemPool()], []
    ids = [(0, 0), *(pool.id for pool in pools)]
    for which, nbytes, keep in steps:
        with torch.npu.use_mem_pool(pools[which - 1]) if which else contextlib.nullcontext():
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
        if keep:
            held.append((ids[which], tensor))
        del tensor
    memory, segments = device.memory(), [one for one in torch.npu.memory_snapshot() if one["device"] == device.index]
    assert sum(one["total_size"] for one in segments) == memory.reserved
    assert sum(one["allocated_size"] for one in segments) == memory.allocated
    assert sum(one["requested_size"] for one in segments) == memory.requested == sum(x.numel() for _, x in held)
    ranges = sorted((block["address"], block["size"]) for one in segments for block in one["blocks"])
    assert all(a + size <= b for (a, size), (b, _) in zip(ranges, ranges[1:], strict=False))
    assert [_segment_of(tensor)["segment_pool_id"] for _, tensor in held] == [pool for pool, _ in held]
    held.clear()
    pools.clear()
    device.empty_cache()
    assert device.memory().reserved == 0
    torch.npu.set_device(0)


def test_statistics_as_a_nested_dict(device):
    x = _take(5000)
    nested = torch.npu.memory_stats_as_nested_dict(INDEX)
    assert nested["allocated_bytes"]["all"]["current"] == torch.npu.memory_stats(INDEX)["allocated_bytes.all.current"]
    assert nested["requested_bytes"]["all"]["current"] == 5000 == x.numel()


def test_statistics_of_pinned_memory(device):
    torch.npu.reset_peak_host_memory_stats()
    before = torch.npu.host_memory_stats()
    pinned = device.host_empty((1000,), torch.float32)
    during = torch.npu.host_memory_stats()
    assert during["active_bytes.current"] - before["active_bytes.current"] == 4000 == pinned.nbytes
    assert during["active_requests.current"] - before["active_requests.current"] == 1
    del pinned
    after = torch.npu.host_memory_stats()
    assert after["active_bytes.current"] == before["active_bytes.current"]
    assert after["active_bytes.peak"] >= before["active_bytes.current"] + 4000
    assert torch.npu.host_memory_stats_as_nested_dict()["allocations"]["freed"] == after["allocations.freed"] > 0
    torch.npu.reset_accumulated_host_memory_stats()
    torch.npu.reset_peak_host_memory_stats()
    reset = torch.npu.host_memory_stats()
    assert reset["active_bytes.freed"] == 0 and reset["active_bytes.peak"] == reset["active_bytes.current"]


def test_a_freed_block_awaits_the_streams_that_use_it():
    device = open_device("emulated", index=INDEX + 2, capacity_bytes=CARD, streams="adversarial")
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    side, host = device.new_stream(), device.host_empty((1000,), torch.float32)
    x = torch.empty(1000, device=device.torch_device)
    with device.on_stream(side):
        x.copy_(host, non_blocking=True)
    x.record_stream(side)
    del x
    states = {block["state"] for one in torch.npu.memory_snapshot() for block in one["blocks"]}
    assert "active_awaiting_free" in states
    device.synchronize()
    device.empty_cache()
    assert [one for one in torch.npu.memory_snapshot() if one["device"] == device.index] == []
    torch.npu.set_device(0)
