"""Emulate an NPU on the CPU: a PyTorch device `npu` with its own memory, streams, generators and collectives.

    build.py      sources ──g++, once──► cache folder ──► rlfusion_npu.so
    frontend.py   the module `torch.npu`, with the names of torch_npu
    graphs.py     what was captured, replayed
    operators/    references of operators of `torch.ops.npu`, for the schemas in schemas/
    *.h, *.cpp    the device itself (emulator.h lists the files)

    from fusion.npu.emulator import install
    install()                               # builds on first use; afterwards torch.empty(8, device="npu") works

The allocator rounds, caches and splits like a real one, with segments scaled down to the size of the models (heap.h).
Work is done when the call returns; with `streams=adversarial`, copies and collectives run as late as synchronisation
allows, and with `streams=timed` they take time (streams.h). Graphs are lists of operators (graphs.py). Not emulated:
asynchronous kernels, sparse and quantised tensors, autocast, memory pools of a program's own."""

import atexit
import threading
import time
from pathlib import Path
from types import ModuleType

from fusion.npu.emulator.build import BuildError, load_extension

__all__ = ["BuildError", "install"]

_lock = threading.Lock()
_extension: ModuleType | None = None


def install() -> ModuleType:
    """Register `npu` as a device of this process, once, and return the extension.
    Raise BuildError: the extension could not be built.
    Raise ValueError: another backend (torch_npu) already owns the name."""
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
            from fusion.npu.emulator import frontend, operators

            frontend._register(extension)
            operators.register()
            atexit.register(extension.forget_work)
            atexit.register(_wait_for_backward_threads)
            _extension = extension
        return _extension


def _wait_for_backward_threads() -> None:
    """Wait until no backward thread runs. A card's backward pass has its own thread, which still drops Python objects
    after `backward()` has returned; the process aborts if the interpreter ends meanwhile."""
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
