"""The emulated NPU: a PyTorch device `npu` on the CPU, with its own memory, streams, generators and collectives.

    build.py      sources ──g++, once──► cache folder ──► rlfusion_npu.so
    frontend/     the module `torch.npu`, with the names of torch_npu
    *.h, *.cpp    the device itself (emulator.h says which file holds what)

    from fusion.npu.emulator import install
    install()                               # builds on first use; afterwards torch.empty(8, device="npu") works

Its allocator rounds, caches and splits as a real one does, with segments as much smaller as the models are (heap.h).
Work is done when the call returns; with `streams=adversarial` copies and collectives as late as synchronisation allows
(streams.h). Left out: kernels that run late, sparse and quantised tensors, convolutions, graph capture.
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path
from types import ModuleType

from fusion.npu.emulator.build import BuildError, load_extension

__all__ = ["BuildError", "install", "installed"]

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
            atexit.register(extension.forget_work)
            atexit.register(_let_backward_threads_rest)
            _extension = extension
        return _extension


def _let_backward_threads_rest() -> None:
    """A card's backward pass runs in a thread of its own, which still drops Python objects after `backward()` returned.
    If the interpreter ends in that moment the process aborts; so wait until none of these threads is running."""
    quiet = 0
    for _ in range(500):
        quiet = 0 if any(_is_running_backward(task) for task in Path("/proc/self/task").iterdir()) else quiet + 1
        if quiet == 2:
            return
        time.sleep(0.002)


def _is_running_backward(task: Path) -> bool:
    try:
        name, _, rest = (task / "stat").read_text().rpartition(")")
    except OSError:
        return False
    return "(pt_autograd" in name and rest.split()[0] == "R"
