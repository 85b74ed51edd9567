"""The emulated NPU: a PyTorch device `npu` on the CPU, with its own memory, streams, generators and collectives.

    build.py      sources ──g++, once──► cache folder ──► rlfusion_npu.so
    frontend.py   the module `torch.npu`, with the names of torch_npu
    *.h, *.cpp    the device itself (emulator.h says which file holds what)

    from fusion.npu.emulator import install
    install()                               # builds on first use; afterwards torch.empty(8, device="npu") works

Left out: rounding, caching and splitting of blocks (reserved equals allocated), asynchronous execution (everything is
done when the call returns), sparse and quantised tensors, convolutions, graph capture.
"""

from __future__ import annotations

import threading
from types import ModuleType

from fusion.npu.emulator.build import BuildError, build, load_extension

__all__ = ["BuildError", "build", "install", "installed"]

_lock = threading.Lock()
_extension: ModuleType | None = None


def installed() -> bool:
    """Whether the device `npu` of this process is the emulated one."""
    return _extension is not None


def install() -> ModuleType:
    """Makes `npu` a device of this process, once, and returns the extension. Raises BuildError, or ValueError where
    another backend (torch_npu) already owns the name."""
    global _extension
    with _lock:
        if _extension is None:
            import torch

            if torch._C._get_privateuse1_backend_name() != "privateuseone":
                raise ValueError(
                    f"device.kind=emulated: this process has the device {torch._C._get_privateuse1_backend_name()!r} "
                    "already (torch_npu?); use device.kind=npu, or start with TORCH_DEVICE_BACKEND_AUTOLOAD=0"
                )
            extension = load_extension()
            from fusion.npu.emulator import frontend

            frontend.register(extension)
            _extension = extension
        return _extension
