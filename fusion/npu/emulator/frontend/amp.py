"""`torch.npu`: mixed precision, and the legacy tensor types (`torch.npu.FloatTensor(3, 4)`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def is_bf16_supported(including_emulation: bool = False) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("npu")


def set_autocast_enabled(enable: bool) -> None:
    torch.set_autocast_enabled("npu", enable)


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("npu")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("npu", dtype)


class _Autocast(torch.amp.autocast):
    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("npu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class _GradScaler(torch.amp.GradScaler):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__("npu", **kwargs)


namespace = SimpleNamespace(autocast=_Autocast, GradScaler=_GradScaler)


def _legacy(name: str, dtype: torch.dtype) -> type:
    class LegacyMeta(type):
        def __instancecheck__(cls, obj: Any) -> bool:
            return isinstance(obj, torch.Tensor) and obj.device.type == "npu" and obj.dtype == dtype

    def new(cls: type, *args: Any) -> torch.Tensor:
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=dtype, device="npu")
        return torch.empty(*(args or (0,)), dtype=dtype, device="npu")

    return LegacyMeta(name, (), {"__new__": new, "__module__": "torch.npu", "dtype": dtype})


BoolTensor = _legacy("BoolTensor", torch.bool)
ByteTensor = _legacy("ByteTensor", torch.uint8)
CharTensor = _legacy("CharTensor", torch.int8)
ShortTensor = _legacy("ShortTensor", torch.int16)
IntTensor = _legacy("IntTensor", torch.int32)
LongTensor = _legacy("LongTensor", torch.int64)
HalfTensor = _legacy("HalfTensor", torch.float16)
BFloat16Tensor = _legacy("BFloat16Tensor", torch.bfloat16)
FloatTensor = _legacy("FloatTensor", torch.float32)
DoubleTensor = _legacy("DoubleTensor", torch.float64)
