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


def init() -> None:
    _lazy_init()


def _lazy_init() -> None:
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the 'spawn' "
            "start method"
        )


def _lazy_call(callback: Any) -> None:
    callback()


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


_maybe_exchange_device = _exchange_device


class device:
    """Context manager: the current card."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else card_index(device)

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        _exchange_device(self.prev_idx)


class device_of(device):
    """Context manager: the card of a tensor or storage, if it has one."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device.index if obj.device.type == "npu" else None)


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


def get_device_capability(device: Any = None) -> None:
    return None


def can_device_access_peer(device_id: Any, peer_device_id: Any) -> bool:
    return card_index(device_id) != card_index(peer_device_id)


def utilization(device: Any = None) -> int:
    return 0
