"""`Device`: one card of this process, and `open_device`, which finds it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from fusion.npu.config import DeviceConfig

OWNERS = ("weights", "gradients", "optimizer", "kv", "activations", "buckets")
"""What memory is for. Whatever nobody claimed is `activations`."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one card. `requested` (what tensors asked for), `allocated` (the same, rounded to blocks) and `reserved`
    (segments of the card, cached blocks included) are this process's. `fragmented`: reserved and unused, but in pieces
    that cannot be given back. `free`: what this process could still allocate at once; other processes on the card and
    its own cached blocks are taken into account."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    capacity: int
    free: int
    requested: int
    fragmented: int


HANDLE_BYTES = 48
"""Length of a handle by which another process maps memory of a card."""


class Device(ABC):
    """One card. `kind` is `npu`, `cuda`, `emulated`, or `ledger` (an emulated card without a compiler)."""

    kind: str
    index: int
    torch_device: torch.device
    can_share: bool = False
    """Whether `share` and `map` work."""
    process_group_backend: str
    """For `torch.distributed.init_process_group`: gloo for the host's tensors, the card's own for the card's."""

    @abstractmethod
    def memory(self) -> Memory: ...

    @abstractmethod
    def reset_peak(self) -> None:
        """Peaks start again from what is allocated now."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when all work of the card is done."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Gives cached blocks back to the card. Slow on a real one: never on a hot path."""

    @abstractmethod
    def owner(self, name: str) -> AbstractContextManager[None]:
        """Attributes what is allocated inside, also by a backward pass, to `name`, one of OWNERS; the innermost scope
        counts. Meant for long-lived allocations: on a real card it costs some microseconds an operation."""

    @abstractmethod
    def assign(self, tensors: Iterable[torch.Tensor], name: str) -> None:
        """Attributes tensors that exist already (gradients after the first backward pass, say) to `name`."""

    @abstractmethod
    def memory_by_owner(self) -> dict[str, int]:
        """Bytes by owner, one entry for each of OWNERS; they add up to `memory().allocated`."""

    @abstractmethod
    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor, pinned where the card can pin; not counted as memory of the card."""

    def share(self, tensor: torch.Tensor) -> bytes:
        """A handle by which other processes of this user and machine map the storage of ``tensor``. It costs nothing
        and keeps nothing alive: once the storage is freed, its bytes belong to the next block. Raises RuntimeError
        where `can_share` is False."""
        raise RuntimeError(f"{self.torch_device}: memory of this {self.kind} card cannot be shared between processes")

    def map(self, handle: bytes) -> torch.Tensor:
        """The bytes behind a handle as a tensor of this card (uint8 [nbytes]), which is not charged for them. Who
        writes and who reads when is between the processes. Raises ValueError if the owner has ended."""
        raise RuntimeError(f"{self.torch_device}: memory of this {self.kind} card cannot be shared between processes")

    @abstractmethod
    def new_stream(self) -> Any: ...

    @abstractmethod
    def current_stream(self) -> Any: ...

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def event(self, timing: bool = False) -> Any:
        """Has `record(stream)`, `wait(stream)`, `synchronize()`, `query()`; if timing, `elapsed_time(end)` in ms."""

    @abstractmethod
    def describe(self) -> str:
        """One line for people."""


def check_owner(name: str) -> None:
    if name not in OWNERS:
        raise ValueError(f"memory owner {name!r}: expected one of {', '.join(OWNERS)}")


def open_device(
    kind: str = "auto",
    index: int = 0,
    capacity_bytes: int | None = None,
    session: str | None = None,
    streams: str = "eager",
    segments: str = "expandable",
) -> Device:
    """Opens card `index` and makes it the current one of this thread.

    kind: see DeviceConfig.kind. capacity_bytes: HBM of an emulated card (None: 2 GiB, or what the session has), a limit
    for this process on a real one. session: emulated only; processes that open the same card in the same session share
    its capacity, without one the card is this process's own. streams: see DeviceConfig.streams. segments: how an
    emulated card's allocator takes memory, `expandable` or `fixed` (emulator/heap.h); a real one goes by
    PYTORCH_NPU_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, and is expandable where these say nothing: fixed segments that a
    switch frees seldom fit what it takes.

    Raises ValueError for a kind that does not exist or is not there.
    """
    DeviceConfig(kind=kind, capacity_bytes=capacity_bytes, streams=streams).validate()
    if segments not in ("expandable", "fixed"):
        raise ValueError(f"device segments {segments!r}: expected one of expandable, fixed")
    if kind in ("auto", "npu") and (npu := _torch_npu(required=kind == "npu")) is not None:
        return _accelerator("npu", npu, index, capacity_bytes)
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device.kind=cuda: this machine or this build of torch has no CUDA card; try device.kind=auto")
    if kind in ("auto", "cuda") and torch.cuda.is_available():
        return _accelerator("cuda", torch.cuda, index, capacity_bytes)
    return _emulated(index, capacity_bytes, session, streams == "adversarial", segments == "expandable")


def _accelerator(kind: str, module: Any, index: int, capacity_bytes: int | None) -> Device:
    from fusion.npu.accelerator import RealDevice

    os.environ.setdefault(f"PYTORCH_{kind.upper()}_ALLOC_CONF", "expandable_segments:True")  # read at the first tensor
    return RealDevice(kind, module, index, capacity_bytes)


def _emulated(index: int, capacity_bytes: int | None, session: str | None, late: bool, expandable: bool) -> Device:
    from fusion.npu.emulator import BuildError, install

    try:
        extension = install()
    except BuildError as error:
        warnings.warn(
            f"The emulated NPU is not available: {error}. Counting plain CPU tensors instead (device.kind=ledger).",
            stacklevel=3,
        )
        from fusion.npu.ledger import LedgerDevice

        return LedgerDevice(index, capacity_bytes)
    from fusion.npu.accelerator import EmulatedDevice

    return EmulatedDevice(extension, index, capacity_bytes, session, late, expandable)


def _torch_npu(required: bool) -> Any:
    """`torch.npu` of torch_npu if it loads and finds a card. It is imported here and nowhere else: with torch_npu but
    without Ascend's CANN libraries the import fails (and plain `import torch` does too, unless
    TORCH_DEVICE_BACKEND_AUTOLOAD=0)."""
    reason = "torch_npu is not installed"
    if importlib.util.find_spec("torch_npu") is not None:
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            reason = f"torch_npu does not load ({error})"
            if not required:
                warnings.warn(f"{reason}: going on without Ascend cards.", stacklevel=4)
        else:
            if torch.get_device_module("npu").is_available():
                return torch.get_device_module("npu")
            reason = "torch_npu finds no card"
    if required:
        raise ValueError(f"device.kind=npu: {reason}; try device.kind=emulated or device.kind=auto")
    return None
