"""Emulate a card without a compiler, by counting the bytes of plain CPU tensors.

Every tensor that an operation creates in the thread that opened the card counts as memory of the card, except those of
`host_empty`. Workspaces inside an operation, other threads and other processes are not counted."""

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fusion.npu.config import DEFAULT_CAPACITY_BYTES
from fusion.npu.device import Device
from fusion.npu.memory import OWNERS, Memory, check_owner
from fusion.npu.operators import operators_of
from fusion.npu.owners import NewStorages


class Ledger:
    """Count the bytes of live storages by owner; raise torch.OutOfMemoryError at capacity."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated = self.peak = 0
        self.owner = "activations"
        self.counting = True
        self._entries: dict[int, list[Any]] = {}  # storage address -> [weak reference, bytes, owner]
        self._lock = threading.RLock()  # a storage may die, and call back, while the lock is held

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, until it is freed. Raise torch.OutOfMemoryError: it does not fit into the capacity."""
        key, nbytes = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._entries or not self.counting:
                return
            if self.allocated + nbytes > self.capacity_bytes:
                self.refresh()
            if self.allocated + nbytes > self.capacity_bytes:
                owners = ", ".join(f"{name} {size}" for name, size in self.bytes_by_owner().items())
                raise torch.OutOfMemoryError(
                    f"out of memory: {nbytes} bytes requested, {self.allocated} allocated, capacity "
                    f"{self.capacity_bytes} (device.capacity_bytes). By owner: {owners}"
                )
            self._entries[key] = [weakref.ref(storage, lambda _: self._forget(key)), nbytes, self.owner]
            self._change(nbytes)

    def refresh(self) -> None:
        """Update the sizes of all storages, which may have been resized."""
        with self._lock:
            for entry in list(self._entries.values()):
                storage = entry[0]()
                if storage is not None:
                    nbytes = storage.nbytes()
                    self._change(nbytes - entry[1])
                    entry[1] = nbytes

    def bytes_by_owner(self) -> dict[str, int]:
        self.refresh()
        sizes = dict.fromkeys(OWNERS, 0)
        with self._lock:
            for _, nbytes, owner in self._entries.values():
                sizes[owner] += nbytes
        return sizes

    def _forget(self, key: int) -> None:
        with self._lock:
            self._change(-self._entries.pop(key)[1])

    def _change(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)


class HostStream(torch.cpu.Stream):
    """Implement a stream on which all work is done when the call returns."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class HostEvent(torch.cpu.Event):
    """Implement an event as a time of the host's clock."""

    def __init__(self) -> None:
        self.recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self.recorded_s = time.perf_counter()

    def elapsed_time(self, end: "HostEvent") -> float:
        """Return the milliseconds from this event to `end`."""
        if self.recorded_s is None or end.recorded_s is None:
            raise RuntimeError("elapsed_time requires both events to be recorded")
        return (end.recorded_s - self.recorded_s) * 1e3


class LedgerDevice(Device):
    """Implement `Device` with CPU tensors that a ledger counts from its creation until `close()`."""

    kind = "ledger"
    torch_device = torch.device("cpu")
    process_group_backend = "gloo"

    def __init__(self, index: int, capacity_bytes: int | None) -> None:
        self.index = index
        self.operators = operators_of(self.kind)
        self.ledger = Ledger(capacity_bytes or DEFAULT_CAPACITY_BYTES)
        self._mode = NewStorages(self.torch_device, self.ledger.add)
        self._mode.__enter__()

    def close(self) -> None:
        """Stop counting. Devices must be closed in the reverse order of opening."""
        self._mode.__exit__(None, None, None)

    def memory(self) -> Memory:
        self.ledger.refresh()
        now, peak, capacity = self.ledger.allocated, self.ledger.peak, self.ledger.capacity_bytes
        return Memory(
            allocated=now,
            reserved=now,
            peak_allocated=peak,
            peak_reserved=peak,
            capacity=capacity,
            free=max(0, capacity - now),
            requested=now,
            fragmented=0,
        )

    def reset_peak(self) -> None:
        self.ledger.refresh()
        self.ledger.peak = self.ledger.allocated

    def synchronize(self) -> None: ...
    def empty_cache(self) -> None: ...

    @contextmanager
    def owner(self, name: str) -> Iterator[None]:
        check_owner(name)
        previous_owner, self.ledger.owner = self.ledger.owner, name
        try:
            yield
        finally:
            self.ledger.owner = previous_owner

    def memory_by_owner(self) -> dict[str, int]:
        return self.ledger.bytes_by_owner()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.ledger.counting = False
        try:
            return torch.empty(tuple(shape), dtype=dtype)
        finally:
            self.ledger.counting = True

    def new_stream(self) -> HostStream:
        return HostStream()

    def current_stream(self) -> HostStream:
        return HostStream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def event(self, timing: bool = False) -> HostEvent:
        return HostEvent()

    def describe(self) -> str:
        capacity = self.memory().capacity
        return f"CPU tensors counted by a ledger (no emulated NPU: logs say why), {capacity / 2**30:.1f} GiB"
