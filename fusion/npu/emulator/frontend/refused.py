"""`torch.npu`: names of the real card that the emulated one cannot honour. Each is offered, and raises its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NO_GRAPHS = "kernels run when they are called, so that there is nothing to capture; run without a graph"
_NO_DUMP = "CANN's operators do not run here, so that there is nothing to dump"
_NO_CORES = "the CPU has no cube and vector cores to limit"
_NO_RECOVERY = "the host's memory has no errors to find or to recover from"
_NO_OBFUSCATION = "obfuscation is an operator of CANN"
_NO_POOLS = "a card's memory has one pool of each size for every stream; allocate without one"
_NO_ADDRESSES = "memory belongs to tensors; use torch.empty on the card"
_NO_HOST_STATS = "pinned memory is ordinary memory of the host, which is not counted"
_NO_QUEUE = "kernels run when they are called, without a queue"
_NO_KERNELS = "there are no kernels of CANN to choose or to tune"
_NO_SYNC_DEBUG = "the emulated card does not watch synchronising operations"
_DETERMINISTIC = "use torch.use_deterministic_algorithms"

REASONS: dict[str, str] = {
    "CubeMathType": "products of float32 are not rounded; use torch.npu.matmul.allow_hf32",
    "ExternalEvent": _NO_GRAPHS,
    "ExternalStream": "no other library creates streams of the emulated card; use torch.npu.Stream",
    "MemPool": _NO_POOLS,
    "MemPoolContext": _NO_POOLS,
    "NPUGraph": _NO_GRAPHS,
    "NPUPluggableAllocator": _NO_POOLS,
    "NpuGraphOpHandler": _NO_GRAPHS,
    "are_compatible_impl_enabled": _NO_KERNELS,
    "caching_allocator_alloc": _NO_ADDRESSES,
    "caching_allocator_delete": _NO_ADDRESSES,
    "change_current_allocator": "the emulated card counts its memory in its own allocator",
    "check_uce_in_memory": _NO_RECOVERY,
    "clear_npu_overflow_flag": "as on Ascend 910B and newer, overflow gives inf and nan; use torch.isfinite",
    "disable_deterministic_with_backward": _DETERMINISTIC,
    "empty_virt_addr_cache": "memory without addresses is not modelled; use torch.npu.empty_cache",
    "enable_deterministic_with_backward": _DETERMINISTIC,
    "finalize_dump": _NO_DUMP,
    "get_device_limit": _NO_CORES,
    "get_npu_overflow_flag": "as on Ascend 910B and newer, overflow gives inf and nan; use torch.isfinite",
    "get_stream_limit": _NO_CORES,
    "get_sync_debug_mode": _NO_SYNC_DEBUG,
    "get_task_queue_enable": _NO_QUEUE,
    "graph": _NO_GRAPHS,
    "graph_pool_handle": _NO_GRAPHS,
    "graph_task_group_begin": _NO_GRAPHS,
    "graph_task_group_end": _NO_GRAPHS,
    "graph_task_update_begin": _NO_GRAPHS,
    "graph_task_update_end": _NO_GRAPHS,
    "host_memory_stats": _NO_HOST_STATS,
    "host_memory_stats_as_nested_dict": _NO_HOST_STATS,
    "init_dump": _NO_DUMP,
    "make_graphed_callables": _NO_GRAPHS,
    "memory_snapshot": "the segments of the allocator are not listed; use torch.npu.memory_stats",
    "npurt": "there is no runtime of CANN whose functions it could return",
    "obfuscation_calculate": _NO_OBFUSCATION,
    "obfuscation_finalize": _NO_OBFUSCATION,
    "obfuscation_initialize": _NO_OBFUSCATION,
    "register_npu_graph_handler": _NO_GRAPHS,
    "reset_accumulated_host_memory_stats": _NO_HOST_STATS,
    "reset_peak_host_memory_stats": _NO_HOST_STATS,
    "reset_stream_limit": _NO_CORES,
    "restart_device": _NO_RECOVERY,
    "set_aoe": _NO_KERNELS,
    "set_deterministic_level": _DETERMINISTIC,
    "set_device_limit": _NO_CORES,
    "set_dump": _NO_DUMP,
    "set_op_timeout_ms": "an operator has returned when its call returns, and cannot be stopped before",
    "set_stream_limit": _NO_CORES,
    "set_sync_debug_mode": _NO_SYNC_DEBUG,
    "set_task_queue_enable": _NO_QUEUE,
    "stop_device": _NO_RECOVERY,
    "stress_detect": "there is no hardware to test",
    "super_kernel_scope_begin": _NO_GRAPHS,
    "super_kernel_scope_end": _NO_GRAPHS,
    "use_compatible_impl": _NO_KERNELS,
    "use_mem_pool": _NO_POOLS,
}
"""Name → why the emulated card refuses it."""

CLASSES = (*(name for name in REASONS if name[0].isupper()), "graph")


def _complain(name: str) -> None:
    raise NotImplementedError(f"torch.npu.{name}: not on the emulated NPU: {REASONS[name]}")


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> None:
        _complain(name)

    if name in CLASSES:
        return type(name, (), {"__new__": refuse, "__module__": "torch.npu"})
    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def refused() -> dict[str, Callable[..., Any]]:
    """Return each refused name with what raises `NotImplementedError` when it is called."""
    return {name: _refusal(name) for name in REASONS}
