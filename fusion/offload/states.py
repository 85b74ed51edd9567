"""Stream the optimizer's states through HBM in groups, one per gradient bucket, of which at most two are in HBM.

    for index, states in groups:                      # the loop of states that stay in HBM, too
        update(states["master"], gradients[index], states["exp_avg"], …)

    host      │ 0 │ 1 │ 2 │ 3 │ …        pinned, holds the states
    fetch ▼     0   1   2   3            a separate stream: slot 0, slot 1, slot 0, …
    current         0   1   2   3        the caller's update, in place in the slot
    store ▲             0   1   2   3    a separate stream

The fetch of group i + 1 is queued before the caller updates group i. It overwrites the slot of group i - 1 state by
state, as the store of each state ends, so that both directions of the link are busy with only two slots. Only streams
wait for events; the host runs ahead. The idea is ZeRO-Infinity's (arXiv 2104.07857, section 6.2), with the update on
the card instead of the CPU."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fusion.npu import Device
from fusion.offload.pool import HostPool

States = dict[str, torch.Tensor]


class StreamedStates:
    """Hold states in pinned host memory, initially zero; HBM holds two slots of the largest group while a loop runs.

    Only one loop at a time may run, to its end or until it is abandoned; a group whose update was abandoned keeps its
    previous states. The loop's body runs on the stream that was current when the loop began. ``groups``: by group, name
    → elements of a flat float32 tensor."""

    def __init__(self, device: Device, groups: Sequence[Mapping[str, int]], pool: HostPool | None = None):
        self._device = device
        nbytes = [numel * torch.float32.itemsize for sizes in groups for numel in sizes.values()]
        regions = iter((pool if pool is not None else HostPool(device)).take(nbytes))
        self._host = [{name: next(regions).view(torch.float32).zero_() for name in sizes} for sizes in groups]
        self._fetching, self._storing = device.new_stream(), device.new_stream()

    def __iter__(self) -> Iterator[tuple[int, States]]:
        """Yield every group in order, on the card; it may be read and written until the next one is requested."""
        current = self._device.current_stream()
        slots = [_Slot(self._device, self._host) for _ in self._host[:2]]
        # Work queued earlier may still use the slots' memory, and follows the stores of the last loop.
        self._fetching.wait_stream(current)
        try:
            for index, host in enumerate(self._host):
                slot = slots[index % 2]
                if index == 0:
                    slot.fetch(host, self._fetching)
                if index + 1 < len(self._host):
                    slots[(index + 1) % 2].fetch(self._host[index + 1], self._fetching)
                slot.fetched.wait(current)
                yield index, slot.states(host)
                slot.leave(current)
                slot.store(host, self._storing)
        finally:
            for stream in (self._fetching, self._storing):
                current.wait_stream(stream)
            for slot in slots:
                slot.free()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Map `name.index` to the live tensor in host memory; blocks until copies are done. Call it before every
        use."""
        self._fetching.synchronize()
        self._storing.synchronize()
        return {f"{name}.{index}": state for index, host in enumerate(self._host) for name, state in host.items()}


class _Slot:
    """Hold HBM for any one group. `_vacant`: by state, the event after which its memory may be overwritten."""

    def __init__(self, device: Device, groups: Iterable[States]):
        self._device = device
        largest: dict[str, int] = {}
        for host in groups:
            for name, state in host.items():
                largest[name] = max(largest.get(name, 0), state.numel())
        with device.owner("optimizer"):
            self._room = {
                name: torch.empty(numel, dtype=torch.float32, device=device.torch_device)
                for name, numel in largest.items()
            }
        self._vacant: dict[str, Any] = {}
        self.fetched: Any = None
        self._left: Any = None

    def states(self, host: States) -> States:
        return {name: self._room[name][: state.numel()] for name, state in host.items()}

    def fetch(self, host: States, stream: Any) -> None:
        with self._device.on_stream(stream):
            for name, state in self.states(host).items():
                if name in self._vacant:
                    stream.wait_event(self._vacant[name])
                state.copy_(host[name], non_blocking=True)
        self.fetched = self._event(stream)

    def leave(self, stream: Any) -> None:
        """Record that the caller has queued its last use of the group."""
        self._left = self._event(stream)
        self._vacant = dict.fromkeys(self._room, self._left)

    def store(self, host: States, stream: Any) -> None:
        stream.wait_event(self._left)
        for name, state in self.states(host).items():
            with self._device.on_stream(stream):
                host[name].copy_(state, non_blocking=True)
            self._vacant[name] = self._event(stream)

    def free(self) -> None:
        for room in self._room.values():
            room.untyped_storage().resize_(0)

    def _event(self, stream: Any) -> Any:
        event = self._device.event()
        event.record(stream)
        return event
