"""Define `Device`, one card of this process, and `open_device`, which selects and opens it."""

import importlib
import importlib.util
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from fusion.npu.config import OPERATORS, DeviceConfig
from fusion.npu.memory import Memory
from fusion.npu.operators import Plain, operators_of

T = TypeVar("T")

HANDLE_BYTES = 48
"""Length of a handle by which another process maps memory of a card."""


class Device(ABC):
    """Represent one card. `kind` is `npu`, `cuda`, `emulated`, or `ledger` (an emulated card without a compiler)."""

    kind: str
    index: int
    torch_device: torch.device
    can_share: bool = False
    """Whether `share` and `map` are supported."""
    operators: Plain
    """Table of the operations that the card fuses"""
    process_group_backend: str
    """Backend of `torch.distributed.init_process_group`: gloo for the host's tensors, the card's own for the card's."""

    @abstractmethod
    def memory(self) -> Memory:
        """Return the current memory statistics."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Reset the peaks to the current values."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work of the card is done."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Release cached blocks to the card. Slow on a real one: never on a hot path."""

    @abstractmethod
    def owner(self, name: str) -> AbstractContextManager[None]:
        """Attribute what is allocated inside, also by a backward pass, to `name`, one of OWNERS; the innermost scope
        wins. Meant for long-lived allocations: on a real card it costs some microseconds per operation."""

    @abstractmethod
    def memory_by_owner(self) -> dict[str, int]:
        """Return the bytes by owner, one entry for each of OWNERS; they add up to `memory().allocated`."""

    @abstractmethod
    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised CPU tensor, pinned where the card supports it; not counted as memory of the
        card."""

    def share(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Return handles by which other processes of this user and machine map the storage of ``tensors``, each of
        HANDLE_BYTES, in their order.

        A handle is free and does not keep the storage alive: once the storage is freed, its bytes are reused.
        Raise RuntimeError: `can_share` is False."""
        raise RuntimeError(f"{self.torch_device}: memory of this {self.kind} card cannot be shared between processes")

    def map(self, handles: bytes, mapped: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Map the bytes behind each handle as a tensor of this card, uint8 [nbytes], which does not count as its
        memory. The processes synchronise reads and writes themselves. ``mapped``: for each handle None, or a tensor
        that this returned for as many bytes, or a view of all of it. It is returned; its storage and with it all of its
        views move to the bytes behind the handle. Whether the owner has ended is not checked again.
        Raise ValueError: the process that owns the memory has ended; one of ``mapped`` has another size.
        Raise RuntimeError: `can_share` is False."""
        raise RuntimeError(f"{self.torch_device}: memory of this {self.kind} card cannot be shared between processes")

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same bytes for a library that does not know emulated cards: on these a CPU tensor,
        on other cards ``tensor`` itself.

        It is valid until the storage is released or resized. Synchronise before the library reads what the card has
        written.
        Raise ValueError: the storage is released."""
        return tensor

    def capture(self, compute: Callable[[], T], sharing: Any = None) -> tuple[Any, T]:
        """Capture what ``compute`` runs on the card as a graph. Return it and what ``compute`` returned, tensors that
        every `replay()` of the graph writes again. ``compute`` is called twice, as the first time warms up.
        ``sharing``: another graph, which shares its memory, as the two are never replayed at the same time.
        Raise RuntimeError: ``compute`` waits for the card or copies from or to the host; this card has no graphs."""
        raise RuntimeError(f"{self.torch_device}: this {self.kind} card captures no graphs")

    @abstractmethod
    def new_stream(self) -> Any: ...

    @abstractmethod
    def current_stream(self) -> Any: ...

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def event(self, timing: bool = False) -> Any:
        """Create an event with `record(stream)`, `wait(stream)`, `synchronize()`, `query()` and, if timing,
        `elapsed_time(end)` in ms."""

    @abstractmethod
    def describe(self) -> str:
        """Return a one-line description of the card."""


def to_card(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor of the host to a card, from pinned memory: the host does not wait for the card, as it would until
    all is done that was launched before. What is on a card already stays as it is."""
    device = torch.device(device)
    if host.device.type != "cpu" or device.type == "cpu" or not host.numel():
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def open_device(
    kind: str = "auto",
    index: int = 0,
    capacity_bytes: int | None = None,
    streams: str = "eager",
    operators: str = "auto",
    deterministic: bool = False,
    rates: tuple[float, float] | None = None,
) -> Device:
    """Open card `index` and make it the current one of this thread.
    ``kind``: see DeviceConfig.kind.
    ``capacity_bytes``: HBM of an emulated card (None: 2 GiB); a limit for this process on a real one.
    ``streams``, ``operators``, ``deterministic``: see DeviceConfig.
    ``rates``: `host_bytes_per_s` and `wire_bytes_per_s` of DeviceConfig; None: their defaults.
    Raise ValueError: the kind does not exist or is not available."""
    config = DeviceConfig(
        kind=kind, capacity_bytes=capacity_bytes, streams=streams, operators=operators, deterministic=deterministic
    )
    if rates is not None:
        config.host_bytes_per_s, config.wire_bytes_per_s = rates
    config.validate()
    device = _open(kind, index, config)
    if device.kind not in (*OPERATORS[operators], "ledger"):
        raise ValueError(f"device.operators={operators}: this machine's card is of the kind {device.kind}")
    device.operators = operators_of(device.kind, operators)
    return device


def _open(kind: str, index: int, config: DeviceConfig) -> Device:
    if kind in ("auto", "npu") and (npu := _torch_npu(required=kind == "npu")) is not None:
        return _accelerator("npu", npu, index, config)
    if kind == "cuda":
        check_cards(kind)
    if kind in ("auto", "cuda") and torch.cuda.is_available():
        return _accelerator("cuda", torch.cuda, index, config)
    return _emulated(index, config)


def _accelerator(kind: str, module: Any, index: int, config: DeviceConfig) -> Device:
    from fusion.npu.accelerator import RealDevice

    # Fixed segments that a switch frees rarely fit what it allocates. Read at the first tensor.
    os.environ.setdefault(f"PYTORCH_{kind.upper()}_ALLOC_CONF", "expandable_segments:True")
    if config.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return RealDevice(kind, module, index, capacity_bytes=config.capacity_bytes)


def _emulated(index: int, config: DeviceConfig) -> Device:
    from fusion.npu.emulator import BuildError, install

    try:
        extension = install()
    except BuildError as error:
        warnings.warn(
            f"The emulated NPU is not available: {error}. Counting plain CPU tensors instead.",
            stacklevel=3,
        )
        from fusion.npu.ledger import LedgerDevice

        return LedgerDevice(index, config.capacity_bytes)
    from fusion.npu.accelerator import EmulatedDevice

    return EmulatedDevice(extension, index, config)


NO_CANN = "Ascend cards need CANN (source its set_env.sh) and torch_npu"


def check_cards(kind: str) -> None:
    """Check, without touching a card, that this machine can have cards of ``kind``.
    Raise ValueError: it cannot; says what is missing."""
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        _torch_npu(required=True)
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device.kind=cuda: this machine or this build of torch has no CUDA card; try device.kind=auto")


def _torch_npu(required: bool) -> Any:
    """Return `torch.npu` of torch_npu if it loads and finds a card, else None.

    torch_npu is imported only here: without Ascend's CANN libraries the import fails (and so does plain `import torch`
    where torch_npu is installed, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0).
    Raise ValueError: ``required``, and torch_npu is missing, does not load or finds no card."""
    reason = "torch_npu is not installed"
    if importlib.util.find_spec("torch_npu") is not None:
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            reason = f"torch_npu does not load ({error})"
            if not required:
                warnings.warn(f"{reason}: continuing without Ascend cards.", stacklevel=4)
        else:
            if torch.get_device_module("npu").is_available():
                return torch.get_device_module("npu")
            reason = "torch_npu finds no card"
    if required:
        raise ValueError(f"device.kind=npu: {reason}; {NO_CANN}; try device.kind=emulated or device.kind=auto")
    return None
