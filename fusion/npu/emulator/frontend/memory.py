"""`torch.npu`: the allocator: its statistics, pools of memory, raw blocks."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fusion.npu.emulator.frontend import state
from fusion.npu.emulator.frontend.state import card_index


def memory_allocated(device: Any = None) -> int:
    return state.extension.allocated(card_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return state.extension.stats(card_index(device))["allocated.peak"]


def memory_reserved(device: Any = None) -> int:
    return state.extension.stats(card_index(device))["reserved.current"]


def max_memory_reserved(device: Any = None) -> int:
    return state.extension.stats(card_index(device))["reserved.peak"]


def memory_stats(device: Any = None) -> dict[str, Any]:
    return dict(torch.accelerator.memory_stats(card_index(device)))


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in memory_stats(device).items():
        *groups, name = path.split(".")
        inner = nested
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    return nested


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return state.extension.free_and_capacity(card_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    state.extension.reset_peak(card_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    state.extension.reset_accumulated(card_index(device))


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    owners = ", ".join(f"{name} {size}" for name, size in state.extension.by_owner(card_index(device)).items())
    return f"npu:{card_index(device)}: {memory_allocated(device)} bytes allocated ({owners})"


memory_cached = memory_reserved
max_memory_cached = max_memory_reserved
reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    state.fractions[card_index(device)] = fraction
    state.extension.limit_process(card_index(device), fraction)


def get_per_process_memory_fraction(device: Any = None) -> float:
    return state.fractions.get(card_index(device), 1.0)


def get_allocator_backend() -> str:
    return "native"


def host_empty_cache() -> None:
    torch._C._accelerator_emptyHostCache() if hasattr(torch._C, "_accelerator_emptyHostCache") else None


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    return state.extension.pinned_stats()


def host_memory_stats() -> dict[str, Any]:
    nested = host_memory_stats_as_nested_dict()
    return {
        f"{group}.{name}": value for group, stats in sorted(nested.items()) for name, value in sorted(stats.items())
    }


def reset_peak_host_memory_stats() -> None:
    state.extension.reset_pinned_peaks()


def reset_accumulated_host_memory_stats() -> None:
    state.extension.reset_pinned_totals()


def ipc_collect() -> None:
    pass


def caching_allocator_alloc(size: int, device: Any = None, stream: Any = None) -> int:
    """Allocate a block of `size` bytes on a stream (a `Stream` or its `npu_stream`) and return its address."""
    if size == 0:
        return 0
    card = card_index(device)
    if stream is None:
        stream = torch.accelerator.current_stream(torch.device("npu", card))
    if isinstance(stream, torch.Stream):
        stream = stream.stream_id
    if not isinstance(stream, int):
        raise TypeError(f"Invalid type for stream argument, expected torch.npu.Stream or int, but got: {stream!r}")
    return state.extension.take(card, size, stream)


def caching_allocator_delete(mem_ptr: int) -> None:
    if mem_ptr and not state.extension.give(mem_ptr):
        raise RuntimeError(f"invalid device pointer: {mem_ptr:#x}")


def memory_snapshot(mempool_id: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """Return the segments of all cards that this process uses, or those of one pool, each with its blocks."""
    segments = state.extension.segments()
    return [one for one in segments if mempool_id is None or one["segment_pool_id"] == tuple(mempool_id)]


class _Functions(NamedTuple):
    """Addresses of the functions that provide the memory of a pool's segments."""

    allocate: int
    free: int


class NPUPluggableAllocator:
    """Functions of a library that allocate and free the memory of a pool (`MemPool(it.allocator())`).

    Their signatures are `void* allocate(ssize_t bytes, int device, void* stream)` and
    `void free(void* memory, size_t bytes, void* stream)`.
    """

    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str) -> None:
        library = ctypes.CDLL(path_to_so_file)
        allocate, free = (
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in (alloc_fn_name, free_fn_name)
        )
        assert allocate is not None and free is not None
        self._allocator = _Functions(allocate, free)

    def allocator(self) -> _Functions:
        return self._allocator


class MemPool:
    """A pool of memory: what is allocated from it shares no segment with other allocations."""

    def __init__(self, allocator: _Functions | None = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        functions = allocator or _Functions(0, 0)
        self._pool = state.extension.make_pool(functions.allocate, functions.free, use_on_oom, no_split)

    def __del__(self) -> None:
        state.extension.drop_pool(self._pool)

    @property
    def id(self) -> tuple[int, int]:
        return (0, self._pool)

    def use_count(self) -> int:
        return state.extension.pool_users(self._pool)

    def snapshot(self) -> list[dict[str, Any]]:
        return memory_snapshot(self.id)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Allocate from `pool` what this thread allocates on a card in the context."""
    card, (_, number) = card_index(device), pool.id
    before = state.extension.enter_pool(card, number)
    try:
        yield
    finally:
        state.extension.leave_pool(card, number, before)


def graph_pool_handle() -> tuple[int, int]:
    """Return an identifier that no pool has."""
    return (0, state.extension.new_pool_id())
