"""`torch.npu`: streams and events."""

from __future__ import annotations

from typing import Any

import torch

from fusion.npu.emulator.frontend.devices import current_device, set_device
from fusion.npu.emulator.frontend.state import card_index


class Stream(torch.Stream):
    """A stream of the card."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device("npu", card_index(device)), priority=priority)

    @property
    def npu_stream(self) -> int:
        return self.stream_id


class _IsEvent(type):
    def __instancecheck__(cls, obj: Any) -> bool:
        return isinstance(obj, torch.Event) and obj.device.type == "npu"


class Event(metaclass=_IsEvent):
    """Make an event of the card: a plain `torch.Event`, because `elapsed_time` refuses subclasses."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return torch.Event("npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def _as_ours(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> Stream:
    return _as_ours(torch.accelerator.current_stream(torch.device("npu", card_index(device))))


def default_stream(device: Any = None) -> Stream:
    index = card_index(device)
    return Stream(stream_id=0, device_index=index, device_type=torch._C._autograd.DeviceType.PrivateUse1.value)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager: the current stream; None changes nothing."""

    def __init__(self, stream_ctx: torch.Stream | None) -> None:
        self.stream = stream_ctx

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = current_stream(self.stream.device)
            self.before_card = current_device()
            set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            set_stream(self.before)
            set_device(self.before_card)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)
