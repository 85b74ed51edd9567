"""The module `torch.npu` of the emulated card, with the names of the real one.

`register(extension)` hangs this module into torch; its functions then answer as torch_npu's do.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "BFloat16Tensor", "BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor", "Event", "FloatTensor", "HalfTensor",
    "IntTensor", "LongTensor", "ShortTensor", "Stream", "StreamContext", "can_device_access_peer", "current_device",
    "current_stream", "default_stream", "device", "device_count", "device_of", "empty_cache", "get_allocator_backend",
    "get_amp_supported_dtype", "get_autocast_dtype", "get_device_capability", "get_device_name",
    "get_device_properties", "get_per_process_memory_fraction", "get_rng_state", "get_rng_state_all",
    "host_empty_cache", "host_memory_stats", "init", "initial_seed", "ipc_collect", "is_autocast_enabled",
    "is_available", "is_bf16_supported", "is_current_stream_capturing", "is_initialized", "manual_seed",
    "manual_seed_all", "max_memory_allocated", "max_memory_cached", "max_memory_reserved", "mem_get_info",
    "memory_allocated", "memory_cached", "memory_reserved", "memory_stats", "memory_summary",
    "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_peak_memory_stats", "seed", "seed_all", "set_autocast_dtype", "set_autocast_enabled", "set_device",
    "set_per_process_memory_fraction", "set_rng_state", "set_rng_state_all", "set_stream", "stream", "synchronize",
    "utilization",
]  # fmt: skip

_extension: Any = None
_initialized = True  # activation checkpointing looks here before it saves the random state
_fractions: dict[int, float] = {}


def register(extension: ModuleType) -> None:
    """Renames PrivateUse1 to `npu`, hangs this module in as `torch.npu` and registers the backend `hccl`."""
    global _extension
    _extension = extension
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    if dist.is_available():
        dist.Backend.register_backend("hccl", _make_hccl, devices=["npu"])


def _make_hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _extension.hccl_over(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


# ---- devices


def _index(which: Any = None) -> int:
    if which is None:
        return current_device()
    if isinstance(which, int):
        return current_device() if which < 0 else which
    found = torch.device(which)
    if found.type != "npu":
        raise ValueError(f"Expected an npu device, but got: {which}")
    return current_device() if found.index is None else found.index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return not _is_in_bad_fork()


def init() -> None:
    _lazy_init()


def _lazy_init() -> None:
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the 'spawn' "
            "start method"
        )


def _lazy_call(callback: Any) -> None:
    callback()


def _is_in_bad_fork() -> bool:
    return _extension.in_forked_child()


def device_count() -> int:
    return _extension.cards


def current_device() -> int:
    return _extension.current_card()


def set_device(device: Any) -> None:
    _extension.exchange_card(_index(device))


def _exchange_device(index: int) -> int:
    return current_device() if index < 0 else _extension.exchange_card(index)


_maybe_exchange_device = _exchange_device


class device:
    """Context manager: the current card."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        _exchange_device(self.prev_idx)


class device_of(device):
    """Context manager: the card of a tensor or storage, if it has one."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device.index if obj.device.type == "npu" else None)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


@dataclass(frozen=True)
class _Properties:
    name: str
    total_memory: int
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 1


def get_device_properties(device: Any = None) -> _Properties:
    return _Properties(name=get_device_name(device), total_memory=mem_get_info(device)[1])


def get_device_name(device: Any = None) -> str:
    _index(device)
    return "Emulated NPU"


def get_device_capability(device: Any = None) -> None:
    return None


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    return _index(device) != _index(peer_device)


def utilization(device: Any = None) -> int:
    return 0


# ---- memory


def memory_allocated(device: Any = None) -> int:
    return _extension.allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return _extension.stats(_index(device))["allocated.peak"]


def memory_reserved(device: Any = None) -> int:
    return _extension.stats(_index(device))["reserved.current"]


def max_memory_reserved(device: Any = None) -> int:
    return _extension.stats(_index(device))["reserved.peak"]


def memory_stats(device: Any = None) -> dict[str, Any]:
    return dict(torch.accelerator.memory_stats(_index(device)))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _extension.free_and_capacity(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    _extension.reset_peak(_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    _extension.reset_accumulated(_index(device))


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    owners = ", ".join(f"{name} {size}" for name, size in _extension.by_owner(_index(device)).items())
    return f"npu:{_index(device)}: {memory_allocated(device)} bytes allocated ({owners})"


memory_cached = memory_reserved
max_memory_cached = max_memory_reserved
reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _fractions[_index(device)] = fraction
    _extension.limit_process(_index(device), fraction)


def get_per_process_memory_fraction(device: Any = None) -> float:
    return _fractions.get(_index(device), 1.0)


def get_allocator_backend() -> str:
    return "native"


def host_empty_cache() -> None:
    torch._C._accelerator_emptyHostCache() if hasattr(torch._C, "_accelerator_emptyHostCache") else None


def host_memory_stats() -> dict[str, Any]:
    return {}


def ipc_collect() -> None:
    pass


# ---- streams and events


class Stream(torch.Stream):
    """A stream of the card; everything on it is done when the call returns."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device("npu", _index(device)), priority=priority)

    @property
    def npu_stream(self) -> int:
        return self.stream_id


class _IsEvent(type):
    def __instancecheck__(cls, obj: Any) -> bool:
        return isinstance(obj, torch.Event) and obj.device.type == "npu"


class Event(metaclass=_IsEvent):
    """Makes an event of the card: a plain `torch.Event`, because `elapsed_time` refuses subclasses."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return torch.Event("npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def _as_ours(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Any = None) -> Stream:
    return _as_ours(torch.accelerator.current_stream(torch.device("npu", _index(device))))


def default_stream(device: Any = None) -> Stream:
    index = _index(device)
    return Stream(stream_id=0, device_index=index, device_type=torch._C._autograd.DeviceType.PrivateUse1.value)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager: the current stream; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = current_stream(self.stream.device)
            self.before_card = current_device()
            set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            set_stream(self.before)
            set_device(self.before_card)


stream = StreamContext


def is_current_stream_capturing() -> bool:
    return False


# ---- random numbers


def _get_generator(device: torch.device) -> torch.Generator:
    return _extension.default_generator(_index(device))


def manual_seed(seed: int) -> None:
    _extension.default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for card in range(device_count()):
        _extension.default_generator(card).manual_seed(int(seed))


def seed() -> int:
    return _extension.default_generator(current_device()).seed()


def seed_all() -> None:
    manual_seed_all(seed())


def initial_seed() -> int:
    return _extension.default_generator(current_device()).initial_seed()


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return _extension.default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    _extension.default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(card) for card in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for card, state in enumerate(new_states):
        set_rng_state(state, card)


# ---- mixed precision


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("npu")


def set_autocast_enabled(enable: bool) -> None:
    torch.set_autocast_enabled("npu", enable)


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("npu")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("npu", dtype)


class _Autocast(torch.amp.autocast):
    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("npu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class _GradScaler(torch.amp.GradScaler):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__("npu", **kwargs)


amp = SimpleNamespace(autocast=_Autocast, GradScaler=_GradScaler)


# ---- legacy tensor types: torch.npu.FloatTensor(3, 4)


def _legacy(name: str, dtype: torch.dtype) -> type:
    class LegacyMeta(type):
        def __instancecheck__(cls, obj: Any) -> bool:
            return isinstance(obj, torch.Tensor) and obj.device.type == "npu" and obj.dtype == dtype

    def new(cls: type, *args: Any) -> torch.Tensor:
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=dtype, device="npu")
        return torch.empty(*(args or (0,)), dtype=dtype, device="npu")

    return LegacyMeta(name, (), {"__new__": new, "__module__": "torch.npu", "dtype": dtype})


BoolTensor = _legacy("BoolTensor", torch.bool)
ByteTensor = _legacy("ByteTensor", torch.uint8)
CharTensor = _legacy("CharTensor", torch.int8)
ShortTensor = _legacy("ShortTensor", torch.int16)
IntTensor = _legacy("IntTensor", torch.int32)
LongTensor = _legacy("LongTensor", torch.int64)
HalfTensor = _legacy("HalfTensor", torch.float16)
BFloat16Tensor = _legacy("BFloat16Tensor", torch.bfloat16)
FloatTensor = _legacy("FloatTensor", torch.float32)
DoubleTensor = _legacy("DoubleTensor", torch.float64)
