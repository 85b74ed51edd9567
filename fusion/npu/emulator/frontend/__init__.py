"""Provide the module `torch.npu` of the emulated card, with the names and files of the real one.

`register(extension)` adds this module to torch; its functions then behave as those of torch_npu. Every name of
torch_npu is offered; what needs what a card emulated on the CPU lacks raises `NotImplementedError` with the reason
(refused.py).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fusion.npu.emulator.frontend import state
from fusion.npu.emulator.frontend.amp import (
    BFloat16Tensor,
    BoolTensor,
    ByteTensor,
    CharTensor,
    DoubleTensor,
    FloatTensor,
    HalfTensor,
    IntTensor,
    LongTensor,
    ShortTensor,
    get_amp_supported_dtype,
    get_autocast_dtype,
    is_autocast_enabled,
    is_bf16_supported,
    set_autocast_dtype,
    set_autocast_enabled,
)
from fusion.npu.emulator.frontend.amp import namespace as amp  # noqa: F401
from fusion.npu.emulator.frontend.devices import (  # noqa: F401
    _exchange_device,
    _is_in_bad_fork,
    _lazy_call,
    _lazy_init,
    _maybe_exchange_device,
    can_device_access_peer,
    current_device,
    device,
    device_count,
    device_of,
    get_device_capability,
    get_device_name,
    get_device_properties,
    init,
    is_available,
    is_initialized,
    set_device,
    synchronize,
    utilization,
)
from fusion.npu.emulator.frontend.memory import (
    MemPool,
    NPUPluggableAllocator,
    caching_allocator_alloc,
    caching_allocator_delete,
    empty_cache,
    get_allocator_backend,
    get_per_process_memory_fraction,
    graph_pool_handle,
    host_empty_cache,
    host_memory_stats,
    host_memory_stats_as_nested_dict,
    ipc_collect,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_host_memory_stats,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_host_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
    use_mem_pool,
)
from fusion.npu.emulator.frontend.mstx import mstx
from fusion.npu.emulator.frontend.options import (
    CubeMathType,
    are_compatible_impl_enabled,
    config,
    conv,
    disable_deterministic_with_backward,
    enable_deterministic_with_backward,
    get_mm_bmm_format_nd,
    get_sync_debug_mode,
    get_task_queue_enable,
    is_jit_compile_false,
    matmul,
    set_compile_mode,
    set_deterministic_level,
    set_mm_bmm_format_nd,
    set_option,
    set_sync_debug_mode,
    set_task_queue_enable,
    use_compatible_impl,
)
from fusion.npu.emulator.frontend.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from fusion.npu.emulator.frontend.refused import refused
from fusion.npu.emulator.frontend.storages import (
    BFloat16Storage,
    BoolStorage,
    ByteStorage,
    CharStorage,
    DoubleStorage,
    FloatStorage,
    HalfStorage,
    IntStorage,
    LongStorage,
    ShortStorage,
)
from fusion.npu.emulator.frontend.streams import (
    Event,
    Stream,
    StreamContext,
    SyncLaunchStream,
    current_blas_handle,
    current_stream,
    default_stream,
    is_current_stream_capturing,
    set_stream,
    stream,
)

__all__ = [
    "BFloat16Storage", "BFloat16Tensor", "BoolStorage", "BoolTensor", "ByteStorage", "ByteTensor", "CharStorage",
    "CharTensor", "CubeMathType", "DoubleStorage", "DoubleTensor", "Event", "FloatStorage", "FloatTensor",
    "HalfStorage", "HalfTensor", "IntStorage", "IntTensor", "LongStorage", "LongTensor", "MemPool",
    "NPUPluggableAllocator", "ShortStorage", "ShortTensor", "Stream", "StreamContext", "SyncLaunchStream",
    "are_compatible_impl_enabled", "caching_allocator_alloc", "caching_allocator_delete", "can_device_access_peer",
    "config", "conv", "current_blas_handle", "current_device", "current_stream", "default_stream", "device",
    "device_count", "device_of", "disable_deterministic_with_backward", "empty_cache",
    "enable_deterministic_with_backward", "get_allocator_backend", "get_amp_supported_dtype", "get_autocast_dtype",
    "get_device_capability", "get_device_name", "get_device_properties", "get_mm_bmm_format_nd",
    "get_per_process_memory_fraction", "get_rng_state", "get_rng_state_all", "get_sync_debug_mode",
    "get_task_queue_enable", "graph_pool_handle", "host_empty_cache", "host_memory_stats",
    "host_memory_stats_as_nested_dict", "init", "initial_seed", "ipc_collect", "is_autocast_enabled",
    "is_available", "is_bf16_supported", "is_current_stream_capturing", "is_initialized", "is_jit_compile_false",
    "manual_seed", "manual_seed_all", "matmul", "max_memory_allocated", "max_memory_cached", "max_memory_reserved",
    "mem_get_info", "memory_allocated", "memory_cached", "memory_reserved", "memory_snapshot", "memory_stats",
    "memory_stats_as_nested_dict", "memory_summary", "mstx", "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_peak_host_memory_stats", "reset_peak_memory_stats", "seed", "seed_all", "set_autocast_dtype",
    "set_autocast_enabled", "set_compile_mode", "set_deterministic_level", "set_device", "set_mm_bmm_format_nd",
    "set_option", "set_per_process_memory_fraction", "set_rng_state", "set_rng_state_all", "set_stream",
    "set_sync_debug_mode", "set_task_queue_enable", "stream", "synchronize", "use_compatible_impl", "use_mem_pool",
    "utilization",
]  # fmt: skip
_refused = refused()
globals().update(_refused)
__all__ += list(_refused)

_initialized = True  # activation checkpointing looks here before it saves the random state


def register(extension: ModuleType) -> None:
    """Renames PrivateUse1 to `npu`, adds this module as `torch.npu` and registers the backend `hccl`."""
    state.extension = extension
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    if dist.is_available():
        dist.Backend.register_backend("hccl", _make_hccl, devices=["npu"])


def _make_hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return state.extension.hccl_over(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))
