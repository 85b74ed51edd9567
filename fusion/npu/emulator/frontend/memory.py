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
    return torch._C._accelerator_getDeviceStats(card_index(device))  # what torch.accelerator flattens


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return state.extension.free_and_capacity(card_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(card_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    state.extension.limit_process(card_index(device), fraction)
