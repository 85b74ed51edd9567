"""`torch.npu`: the available cards and the current one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusion.npu.emulator.frontend import state
from fusion.npu.emulator.frontend.memory import mem_get_info
from fusion.npu.emulator.frontend.state import card_index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return not _is_in_bad_fork()


def _lazy_init() -> None:
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the 'spawn' "
            "start method"
        )


def _is_in_bad_fork() -> bool:
    return state.extension.in_forked_child()


def device_count() -> int:
    return state.extension.cards


def current_device() -> int:
    return state.extension.current_card()


def set_device(device: Any) -> None:
    state.extension.exchange_card(card_index(device))


def _exchange_device(index: int) -> int:
    return current_device() if index < 0 else state.extension.exchange_card(index)


class device:
    """Context manager: the current card."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else card_index(device)

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        _exchange_device(self.prev_idx)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(card_index(device))


@dataclass(frozen=True)
class _Properties:
    name: str
    total_memory: int
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 1


def get_device_properties(device_name: Any = None) -> _Properties:
    return _Properties(name=get_device_name(device_name), total_memory=mem_get_info(device_name)[1])


def get_device_name(device_name: Any = None) -> str:
    card_index(device_name)
    return "Emulated NPU"


def is_bf16_supported(including_emulation: bool = False) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that `torch.autocast` accepts on the card."""
    return [torch.float16, torch.bfloat16, torch.float32]
