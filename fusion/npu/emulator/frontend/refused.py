"""`torch.npu`: names of the real card that the emulated one cannot honour. Each is offered, and raises its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NAMES = {
    "products of float32 are not rounded; use torch.npu.matmul.allow_hf32": "CubeMathType",
    "kernels run when they are called, so that there is nothing to capture; run without a graph": """
        ExternalEvent NPUGraph NpuGraphOpHandler graph graph_pool_handle graph_task_group_begin
        graph_task_group_end graph_task_update_begin graph_task_update_end make_graphed_callables
        register_npu_graph_handler super_kernel_scope_begin super_kernel_scope_end""",
    "no other library creates streams of the emulated card; use torch.npu.Stream": "ExternalStream",
    "a card's memory has one pool of each size for every stream; allocate without one": """
        MemPool MemPoolContext NPUPluggableAllocator use_mem_pool""",
    "there are no kernels of CANN to choose or to tune": "are_compatible_impl_enabled set_aoe use_compatible_impl",
    "memory belongs to tensors; use torch.empty on the card": "caching_allocator_alloc caching_allocator_delete",
    "the emulated card counts its memory in its own allocator": "change_current_allocator",
    "the host's memory has no errors to find or to recover from": "check_uce_in_memory restart_device stop_device",
    "as on Ascend 910B and newer, overflow gives inf and nan; use torch.isfinite": """
        clear_npu_overflow_flag get_npu_overflow_flag""",
    "use torch.use_deterministic_algorithms": """
        disable_deterministic_with_backward enable_deterministic_with_backward set_deterministic_level""",
    "memory without addresses is not modelled; use torch.npu.empty_cache": "empty_virt_addr_cache",
    "CANN's operators do not run here, so that there is nothing to dump": "finalize_dump init_dump set_dump",
    "the CPU has no cube and vector cores to limit": """
        get_device_limit get_stream_limit reset_stream_limit set_device_limit set_stream_limit""",
    "the emulated card does not watch synchronising operations": "get_sync_debug_mode set_sync_debug_mode",
    "kernels run when they are called, without a queue": "get_task_queue_enable set_task_queue_enable",
    "pinned memory is ordinary memory of the host, which is not counted": """
        host_memory_stats host_memory_stats_as_nested_dict reset_accumulated_host_memory_stats
        reset_peak_host_memory_stats""",
    "the segments of the allocator are not listed; use torch.npu.memory_stats": "memory_snapshot",
    "there is no runtime of CANN whose functions it could return": "npurt",
    "obfuscation is an operator of CANN": "obfuscation_calculate obfuscation_finalize obfuscation_initialize",
    "an operator has returned when its call returns, and cannot be stopped before": "set_op_timeout_ms",
    "there is no hardware to test": "stress_detect",
}
"""Reason of the emulated card → the names that it refuses"""

REASONS = {name: reason for reason, names in _NAMES.items() for name in names.split()}
"""Name → why the emulated card refuses it"""

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
