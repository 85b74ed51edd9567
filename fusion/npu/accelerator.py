"""Implement `Device` for cards that PyTorch supports as a device: Ascend, CUDA and the emulated NPU.

All three offer the same functions in their device module (`torch.npu`, `torch.cuda`); they differ in how memory is
attributed to owners and how capacity is set."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fusion.npu.config import DeviceConfig
from fusion.npu.device import HANDLE_BYTES, Device, T
from fusion.npu.memory import OWNERS, Memory, check_owner
from fusion.npu.operators import operators_of
from fusion.npu.owners import NewStorages, StorageOwners

PROCESS_GROUPS = {"npu": "cpu:gloo,npu:hccl", "cuda": "cpu:gloo,cuda:nccl"}


class AcceleratorDevice(Device):
    """Implement what the three have in common; `module` is the device module."""

    def __init__(self, kind: str, type_: str, module: Any, index: int) -> None:
        if not 0 <= index < module.device_count():
            raise ValueError(f"device index {index}: this machine has {module.device_count()} {type_} cards")
        self.kind = kind
        self.index = index
        self.module = module
        self.torch_device = torch.device(type_, index)
        self.operators = operators_of(kind)
        self.process_group_backend = PROCESS_GROUPS[type_]
        module.set_device(index)

    def memory(self) -> Memory:
        stats = self.module.memory_stats_as_nested_dict(self.index)  # flat ones cost a millisecond

        def of_all(name: str, moment: str = "current") -> int:
            return stats[name]["all"][moment] if name in stats else 0  # none before the first tensor

        allocated, reserved = of_all("allocated_bytes"), of_all("reserved_bytes")
        fragmented = of_all("inactive_split_bytes")
        capacity, free = self._capacity_and_free(allocated, reserved, fragmented)
        return Memory(
            allocated=allocated,
            reserved=reserved,
            peak_allocated=of_all("allocated_bytes", "peak"),
            peak_reserved=of_all("reserved_bytes", "peak"),
            capacity=capacity,
            free=free,
            requested=of_all("requested_bytes"),
            fragmented=fragmented,
        )

    @abstractmethod
    def _capacity_and_free(self, allocated: int, reserved: int, fragmented: int) -> tuple[int, int]:
        """Return the bytes of the card, and those that this process can still allocate."""

    def reset_peak(self) -> None:
        self.module.reset_peak_memory_stats(self.index)

    def synchronize(self) -> None:
        self.module.synchronize(self.index)

    def empty_cache(self) -> None:
        self.module.empty_cache()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def capture(self, compute: Callable[[], T], sharing: Any = None) -> tuple[Any, T]:
        compute()
        options: dict[str, Any] = dict(capture_error_mode="thread_local")  # other threads copy meanwhile
        if self.torch_device.type == "npu":
            graph = self.module.NPUGraph()
            options["auto_dispatch_capture"] = True
        else:
            graph = self.module.CUDAGraph()
        with self.module.graph(graph, pool=None if sharing is None else sharing.pool(), **options):
            computed = compute()
        return graph, computed

    def new_stream(self) -> Any:
        return self.module.Stream(self.torch_device)

    def current_stream(self) -> Any:
        return self.module.current_stream(self.torch_device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self.module.stream(stream)

    def event(self, timing: bool = False) -> Any:
        return self.module.Event(enable_timing=timing)

    def describe(self) -> str:
        memory = self.memory()
        name = self.module.get_device_name(self.index)
        size = f"{memory.capacity / 2**30:.1f} GiB, {memory.free / 2**30:.1f} GiB free"
        return f"{self.torch_device} ({name}), {size}, operators: {self.operators.name}"


class RealDevice(AcceleratorDevice):
    """Implement `Device` for an Ascend or CUDA card.

    Owners are tracked by weak references to storages; unclaimed memory counts as activations. Memory is not shared
    between processes: torch's IPC handles export whole segments, expandable ones only with newer drivers."""

    def __init__(self, kind: str, module: Any, index: int, capacity_bytes: int | None) -> None:
        super().__init__(kind, kind, module, index)
        self.capacity_bytes = capacity_bytes
        self._owners = StorageOwners()
        if capacity_bytes is not None:
            total = module.mem_get_info(index)[1]
            if capacity_bytes > total:
                raise ValueError(f"device.capacity_bytes={capacity_bytes}: the card has {total} bytes")
            module.set_per_process_memory_fraction(capacity_bytes / total, index)

    def _capacity_and_free(self, allocated: int, reserved: int, fragmented: int) -> tuple[int, int]:
        free, capacity = self.module.mem_get_info(self.index)
        if self.capacity_bytes is not None:
            capacity = min(capacity, self.capacity_bytes)
        return capacity, max(0, min(free + reserved, capacity) - allocated - fragmented)

    def owner(self, name: str) -> AbstractContextManager[None]:
        check_owner(name)
        return NewStorages(self.torch_device, lambda storage: self._owners.assign(storage, name))

    def memory_by_owner(self) -> dict[str, int]:
        claimed = self._owners.bytes_by_owner()
        sizes = {name: claimed.get(name, 0) for name in OWNERS}
        sizes["activations"] = max(0, self.module.memory_allocated(self.index) - sum(claimed.values()))
        return sizes


class EmulatedDevice(AcceleratorDevice):
    """Implement `Device` for the NPU emulated on the CPU (`fusion/npu/emulator`), whose allocator stores the owner of
    every block. ``config``: of `open_device`. Memory of a timed card is not shared: reading another card's would take
    no time."""

    def __init__(self, extension: Any, index: int, config: DeviceConfig) -> None:
        super().__init__("emulated", "npu", torch.get_device_module("npu"), index)
        assert extension.handle_bytes == HANDLE_BYTES
        self._extension = extension
        self._owner_ids = {name: number for number, name in enumerate(extension.owners)}
        timed = config.streams == "timed"
        self.can_share = not timed
        rates = (config.host_bytes_per_s, config.wire_bytes_per_s) if timed else (0.0, 0.0)
        extension.open_card(index, config.capacity_bytes, config.streams != "eager", *rates)

    def _capacity_and_free(self, allocated: int, reserved: int, fragmented: int) -> tuple[int, int]:
        return self._extension.free_and_capacity(self.index)[1], self._extension.largest_request(self.index)

    @contextmanager
    def owner(self, name: str) -> Iterator[None]:
        check_owner(name)
        previous_owner = self._extension.exchange_owner(self._owner_ids[name])
        try:
            yield
        finally:
            self._extension.exchange_owner(previous_owner)

    def memory_by_owner(self) -> dict[str, int]:
        sizes = self._extension.by_owner(self.index)
        return {name: sizes[self._owner_ids[name]] for name in OWNERS}

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._extension.host_view(tensor)

    def share(self, tensors: Sequence[torch.Tensor]) -> bytes:
        return self._extension.share(tensors)

    def map(self, handles: bytes, mapped: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        return self._extension.map_shared(self.index, handles, mapped)

    def describe(self) -> str:
        memory = self.memory()
        return (
            f"{self.torch_device} (emulated on the CPU, torch {torch.__version__}), {memory.capacity / 2**30:.1f} GiB, "
            f"{memory.free / 2**30:.1f} GiB free, operators: {self.operators.name}"
        )
