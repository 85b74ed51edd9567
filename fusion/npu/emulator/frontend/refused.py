"""`torch.npu`: names of the real card that the emulated one cannot honour. Each is offered, and raises its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NO_GRAPHS = "kernels run when they are called, so that there is nothing to capture; run without a graph"
_NO_DUMP = "CANN's operators do not run here, so that there is nothing to dump"
_NO_CORES = "the CPU has no cube and vector cores to limit"
_NO_RECOVERY = "the host's memory has no errors to find or to recover from"
_NO_OBFUSCATION = "obfuscation is an operator of CANN"

REASONS: dict[str, str] = {
    "ExternalEvent": _NO_GRAPHS,
    "ExternalStream": "no other library creates streams of the emulated card; use torch.npu.Stream",
    "MemPoolContext": "torch_npu has removed it after 2.10; use torch.npu.use_mem_pool",
    "NPUGraph": _NO_GRAPHS,
    "NpuGraphOpHandler": _NO_GRAPHS,
    "change_current_allocator": "the emulated card counts its memory in its own allocator; "
    "pass the functions to a pool: MemPool(allocator)",
    "check_uce_in_memory": _NO_RECOVERY,
    "clear_npu_overflow_flag": "as on Ascend 910B and newer, overflow gives inf and nan; use torch.isfinite",
    "empty_virt_addr_cache": "memory without addresses is not modelled; use torch.npu.empty_cache",
    "finalize_dump": _NO_DUMP,
    "get_device_limit": _NO_CORES,
    "get_npu_overflow_flag": "as on Ascend 910B and newer, overflow gives inf and nan; use torch.isfinite",
    "get_stream_limit": _NO_CORES,
    "graph": _NO_GRAPHS,
    "graph_task_group_begin": _NO_GRAPHS,
    "graph_task_group_end": _NO_GRAPHS,
    "graph_task_update_begin": _NO_GRAPHS,
    "graph_task_update_end": _NO_GRAPHS,
    "init_dump": _NO_DUMP,
    "make_graphed_callables": _NO_GRAPHS,
    "npurt": "there is no runtime of CANN whose functions it could return",
    "obfuscation_calculate": _NO_OBFUSCATION,
    "obfuscation_finalize": _NO_OBFUSCATION,
    "obfuscation_initialize": _NO_OBFUSCATION,
    "register_npu_graph_handler": _NO_GRAPHS,
    "reset_stream_limit": _NO_CORES,
    "restart_device": _NO_RECOVERY,
    "set_aoe": "there are no kernels of CANN to tune",
    "set_device_limit": _NO_CORES,
    "set_dump": _NO_DUMP,
    "set_op_timeout_ms": "an operator has returned when its call returns, and cannot be stopped before",
    "set_stream_limit": _NO_CORES,
    "stop_device": _NO_RECOVERY,
    "stress_detect": "there is no hardware to test",
    "super_kernel_scope_begin": _NO_GRAPHS,
    "super_kernel_scope_end": _NO_GRAPHS,
}
"""Name → why the emulated card refuses it."""

CLASSES = ("ExternalEvent", "ExternalStream", "MemPoolContext", "NPUGraph", "NpuGraphOpHandler", "graph")


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
