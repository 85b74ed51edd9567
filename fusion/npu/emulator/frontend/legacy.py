"""`torch.npu`: the legacy types (`torch.npu.FloatTensor(3, 4)`, `torch.npu.FloatStorage(4)`)."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.storage import _LegacyStorage

DTYPES = {
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float": torch.float32,
    "Double": torch.float64,
}


def _tensor(name: str, dtype: torch.dtype) -> type:
    class LegacyMeta(type):
        def __instancecheck__(cls, obj: Any) -> bool:
            return isinstance(obj, torch.Tensor) and obj.device.type == "npu" and obj.dtype == dtype

    def new(cls: type, *args: Any) -> torch.Tensor:
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=dtype, device="npu")
        return torch.empty(*(args or (0,)), dtype=dtype, device="npu")

    return LegacyMeta(name, (), {"__new__": new, "__module__": "torch.npu", "dtype": dtype})


def _unavailable(cls: type, *args: Any, **options: Any) -> Any:
    raise RuntimeError("from_buffer: Not available for NPU storage")


def _storage(name: str, dtype: torch.dtype) -> Any:
    members = {"dtype": dtype, "_dtype": dtype, "__module__": "torch.npu", "from_buffer": classmethod(_unavailable)}
    storage = types.new_class(name, (_LegacyStorage,), exec_body=lambda body: body.update(members))
    torch._storage_classes.add(storage)
    return storage


def legacy_types() -> dict[str, Any]:
    """Return each type by its name."""
    made = {"Tensor": _tensor, "Storage": _storage}
    return {name + kind: make(name + kind, dtype) for name, dtype in DTYPES.items() for kind, make in made.items()}
