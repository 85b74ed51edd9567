"""Provide the module `torch.npu` of the emulated card, with the names and files of the real one.

`register(extension)` adds this module to torch; its functions then behave as those of torch_npu. It offers what this
project and PyTorch call; any other name raises `AttributeError`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fusion.npu.emulator.frontend import devices, memory, random, state, streams
from fusion.npu.emulator.frontend.devices import _is_in_bad_fork, _lazy_init  # noqa: F401

_initialized = True  # activation checkpointing looks here before it saves the random state


def _defined_in(module: ModuleType) -> dict[str, Any]:
    """Return the public functions, classes and objects of a module by name, without those that it imports."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


def register(extension: ModuleType) -> None:
    """Rename PrivateUse1 to `npu`, add this module as `torch.npu` and register the backend `hccl`."""
    state.extension = extension
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    if dist.is_available():
        dist.Backend.register_backend("hccl", _make_hccl, devices=["npu"])


def _make_hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return state.extension.hccl_over(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


_offered: dict[str, Any] = {}
for _module in (devices, memory, random, streams):
    _offered |= _defined_in(_module)
globals().update(_offered)
__all__ = list(_offered)
