"""`torch.npu`: the legacy storages (`torch.npu.FloatStorage(4)`)."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.storage import _LegacyStorage


def _unavailable(cls: type, *args: Any, **options: Any) -> Any:
    raise RuntimeError("from_buffer: Not available for NPU storage")


def _storage(name: str, dtype: torch.dtype) -> Any:
    members = {"dtype": dtype, "_dtype": dtype, "__module__": "torch.npu", "from_buffer": classmethod(_unavailable)}
    storage = types.new_class(name, (_LegacyStorage,), exec_body=lambda body: body.update(members))
    torch._storage_classes.add(storage)
    return storage


BoolStorage = _storage("BoolStorage", torch.bool)
ByteStorage = _storage("ByteStorage", torch.uint8)
CharStorage = _storage("CharStorage", torch.int8)
ShortStorage = _storage("ShortStorage", torch.int16)
IntStorage = _storage("IntStorage", torch.int32)
LongStorage = _storage("LongStorage", torch.int64)
HalfStorage = _storage("HalfStorage", torch.float16)
BFloat16Storage = _storage("BFloat16Storage", torch.bfloat16)
FloatStorage = _storage("FloatStorage", torch.float32)
DoubleStorage = _storage("DoubleStorage", torch.float64)
