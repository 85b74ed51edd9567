"""`torch.npu`: the allocator and its statistics."""

from __future__ import annotations

from typing import Any

import torch

from fusion.npu.emulator.frontend import state
from fusion.npu.emulator.frontend.state import card_index


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(card_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(card_index(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(card_index(device))


def max_memory_reserved(device: Any = None) -> int:
    return torch.accelerator.max_memory_reserved(card_index(device))


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
    torch.accelerator.reset_peak_memory_stats(card_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_accumulated_memory_stats(card_index(device))


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


def ipc_collect() -> None:
    pass
