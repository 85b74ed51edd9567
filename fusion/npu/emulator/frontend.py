"""Provide the module `torch.npu` of the emulated card, with the names of the real one.

Its functions behave as those of torch_npu. It offers what this project and PyTorch call; any other name raises
`AttributeError`."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fusion.npu.emulator.graphs import NPUGraph as NPUGraph
from fusion.npu.emulator.graphs import graph as graph

_initialized = True  # activation checkpointing looks here before it saves the random state
_extension: Any = None


def _register(extension: ModuleType) -> None:
    """Rename PrivateUse1 to `npu`, add this module as `torch.npu` and register the backend `hccl`."""
    global _extension
    _extension = extension
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    if dist.is_available():
        dist.Backend.register_backend("hccl", _make_hccl, devices=["npu"])


def _make_hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _extension.hccl_over(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


def _card_index(which: Any = None) -> int:
    """Return the card that an index, name, device or None (the current card) refers to.
    Raise ValueError: another kind of device."""
    index = which
    if which is not None and not isinstance(which, int):
        device = torch.device(which)
        if device.type != "npu":
            raise ValueError(f"Expected an npu device, but got: {which}")
        index = device.index
    return _extension.current_card() if index is None or index < 0 else index


# Cards


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return not _is_in_bad_fork()


def _lazy_init() -> None:
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the 'spawn' "
            "start method"
        )


def _is_in_bad_fork() -> bool:
    return _extension.in_forked_child()


def device_count() -> int:
    return _extension.cards


def current_device() -> int:
    return _extension.current_card()


def set_device(device: Any) -> None:
    _extension.exchange_card(_card_index(device))


def _exchange_device(index: int) -> int:
    return current_device() if index < 0 else _extension.exchange_card(index)


class device:
    """Context manager: the current card."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else _card_index(device)

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        _exchange_device(self.prev_idx)


def get_device_name(device_name: Any = None) -> str:
    _card_index(device_name)
    return "Emulated NPU"


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that `torch.autocast` accepts on the card: none, so that it warns and casts nothing."""
    return []


# The allocator and its statistics


def _of_card(function: Callable[[int], Any]) -> Callable[..., Any]:
    """Return a function of `torch.accelerator` for a card that is named in any way."""

    def call(device: Any = None) -> Any:
        return function(_card_index(device))

    return call


synchronize = _of_card(torch.accelerator.synchronize)
memory_allocated = _of_card(torch.accelerator.memory_allocated)
max_memory_allocated = _of_card(torch.accelerator.max_memory_allocated)
memory_reserved = _of_card(torch.accelerator.memory_reserved)
max_memory_reserved = _of_card(torch.accelerator.max_memory_reserved)
memory_stats = _of_card(lambda card: dict(torch.accelerator.memory_stats(card)))
memory_stats_as_nested_dict = _of_card(
    lambda card: torch._C._accelerator_getDeviceStats(card)
)  # before it is flattened
mem_get_info = _of_card(lambda card: _extension.free_and_capacity(card))
reset_peak_memory_stats = _of_card(torch.accelerator.reset_peak_memory_stats)


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _extension.limit_process(_card_index(device), fraction)


# Random numbers


def manual_seed(seed: int) -> None:
    _extension.default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for card in range(device_count()):
        _extension.default_generator(card).manual_seed(int(seed))


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return _extension.default_generator(_card_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    _extension.default_generator(_card_index(device)).set_state(new_state)


# Streams and events


class Stream(torch.Stream):
    """A stream of the card."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device("npu", _card_index(device)), priority=priority)


class _IsEvent(type):
    def __instancecheck__(cls, obj: Any) -> bool:
        return isinstance(obj, torch.Event) and obj.device.type == "npu"


class Event(metaclass=_IsEvent):
    """Make an event of the card: a plain `torch.Event`, because `elapsed_time` refuses subclasses."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return torch.Event("npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: Any = None) -> Stream:
    stream = torch.accelerator.current_stream(torch.device("npu", _card_index(device)))
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def default_stream(device: Any = None) -> Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return Stream(stream_id=0, device_index=_card_index(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class StreamContext:
    """Context manager: the current stream; None changes nothing."""

    def __init__(self, stream_ctx: torch.Stream | None) -> None:
        self.stream = stream_ctx

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = current_stream(self.stream.device)
            self.before_card = current_device()
            set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            set_stream(self.before)
            set_device(self.before_card)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


__all__ = [
    name
    for name, value in globals().items()
    if name[0] != "_" and getattr(value, "__module__", None) in (__name__, NPUGraph.__module__)
]
