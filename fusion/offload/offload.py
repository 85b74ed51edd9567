"""Move tensors from HBM to the host and back, bitwise, while every view of them stays valid.

    resident ──out──► leaving ──poll, wait: copy done──► out ──back──► returning ──wait──► resident
                      HBM and host               host only     HBM allocated, host kept  host released

The storage is moved: parameters, flat buckets and their views are valid again once `wait` was called after `back`, and
must not be read or written from `out` until then.

Copies run directly between a tensor's own storage and the pinned pool, so there is no staging buffer in HBM and no
double-buffering: all pieces are queued at once and the copy engine processes them without the host. Pieces are at most
`bucket_bytes`, so that copies of other streams (token ids, those of a switch) can run in between. Each direction has
its own stream, since the link carries both at once.

Ordering: a copy starts after what is queued on the current stream at the call. Memory of a storage is released only
after the host has seen the event behind its copy, so no other stream can collide with the copy, and `record_stream` is
not needed. Memory to come back is allocated on, and belongs to, the current stream, whose earlier work may still use
it: the copy in waits for that work. A host region is reused only after the host has seen the end of the copy out of it.
No call waits for the whole card or empties the allocator's cache."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion.npu import Device
from fusion.offload.pool import HostPool

BUCKET_BYTES = 64 << 20


@dataclass(eq=False)
class _Trip:
    """Track one storage that is leaving, out or returning, and the names of its tensors."""

    content: torch.Tensor
    """The whole storage on the device as uint8."""
    names: list[str] = field(default_factory=list)
    host: torch.Tensor = field(init=False)
    """Host region of the content, which `out` takes."""
    copied: Any = None
    """Event behind the current copy; None: there is none."""

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.content.untyped_storage()

    @property
    def key(self) -> int:
        """Identity of the storage, with memory or without."""
        return self.storage._cdata


class Offloader:
    """Move the storage of named tensors between the card and a `HostPool`, asynchronously; `wait` makes it blocking.
    ``bucket_bytes``: maximum size of a piece that is copied at once."""

    def __init__(self, device: Device, pool: HostPool | None = None, bucket_bytes: int = BUCKET_BYTES):
        self._device, self._bucket_bytes = device, bucket_bytes
        self.pool = pool if pool is not None else HostPool(device)
        self._stream_out, self._stream_back = device.new_stream(), device.new_stream()
        self._away: dict[str, _Trip] = {}
        self._returning: dict[int, _Trip] = {}  # by key; the host region is still being read

    def out(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start copying the storage of each tensor to the host; `poll` or `wait` releases it on the card.

        Several tensors may share a storage: it is copied once, and they leave and return together. All leave or none.
        Raise RuntimeError: the host has no memory for them; all of them are still resident."""
        leaving = self._storages(tensors)
        regions = self._regions([trip.content.numel() for trip in leaving])
        self._stream_out.wait_stream(self._device.current_stream())
        try:
            for trip, region in zip(leaving, regions, strict=True):
                if trip.key in self._returning:
                    self._stream_out.wait_event(self._returning[trip.key].copied)
                trip.host, trip.copied = region, self._copy(self._stream_out, region, trip.content)
        except BaseException:
            self._stream_out.synchronize()
            self.pool.give(regions)
            raise
        self._away.update({name: trip for trip in leaving for name in trip.names})

    def back(self, names: Iterable[str] | None = None) -> None:
        """Allocate memory for tensors (default: all that are not resident) and start copying their content in.

        Tensors that have not left yet stay resident. The memory has the same owner as before.
        Raise torch.OutOfMemoryError: there is not enough memory; what is out stays out, and no memory is kept."""
        self.poll()
        coming = list(self._trips(names))
        absent = [trip for trip in coming if trip.copied is None]
        try:
            for trip in absent:
                trip.storage.resize_(trip.content.numel())
            self._stream_back.wait_stream(self._device.current_stream())
            events = [self._copy(self._stream_back, trip.content, trip.host) for trip in absent]
        except BaseException:
            self._stream_back.synchronize()
            for trip in absent:
                trip.storage.resize_(0)
            raise
        for trip, event in zip(absent, events, strict=True):
            trip.copied = event
        for trip in coming:
            if trip.key in self._returning:
                self._settle(self._returning[trip.key])
            self._returning[trip.key] = trip
            for name in trip.names:
                del self._away[name]

    def wait(self, names: Iterable[str] | None = None) -> None:
        """Wait for the copies of the named tensors (default: of all).

        Returning tensors may be used by all work queued on the current stream from now on; the host does not block.
        Leaving tensors are on the host and released on the card afterwards; the host blocks until their copies are
        done."""
        selected = None if names is None else set(names)
        for trip in self._returning.values():
            if selected is None or not selected.isdisjoint(trip.names):
                trip.copied.wait(self._device.current_stream())
        for trip in self._trips(name for name in self._away if selected is None or name in selected):
            if trip.copied is not None:
                trip.copied.synchronize()
                self._arrived(trip)

    def poll(self) -> None:
        """Release the memory that finished copies no longer need, on the card and on the host. Never blocks."""
        for trip in self._trips(None):
            if trip.copied is not None and trip.copied.query():
                self._arrived(trip)
        for trip in list(self._returning.values()):
            if trip.copied.query():
                self._settle(trip)

    def host(self, name: str) -> torch.Tensor:
        """Return the content of an offloaded tensor on the host: its whole storage, uint8 [bytes], pinned where the
        card supports it. Read only, and not after `back` was called for it."""
        trip = self._away.get(name)
        assert trip is not None and trip.copied is None, f"{name} is not on the host"
        return trip.host

    def resident(self, name: str) -> bool:
        """Return whether the tensor never left, or `back` was called for it."""
        return name not in self._away

    def _storages(self, tensors: Mapping[str, torch.Tensor]) -> list[_Trip]:
        """Return the storages of tensors, each once, in order."""
        trips: dict[int, _Trip] = {}
        for name, tensor in tensors.items():
            assert name not in self._away, f"{name} is out already"
            storage = tensor.untyped_storage()
            assert tensor.device == self._device.torch_device, f"{name} is on {tensor.device}, not on the card"
            assert tensor.numel() == 0 or storage.nbytes() > 0, f"{name} holds no storage: it was released or is out"
            if storage.nbytes() > 0:
                trips.setdefault(storage._cdata, _Trip(_bytes_of(name, tensor))).names.append(name)
        for other in self._trips(None):
            trip = trips.get(other.key)
            assert trip is None, f"{trip and trip.names[0]} shares its storage with {other.names[0]}, which is leaving"
        return list(trips.values())

    def _trips(self, names: Iterable[str] | None) -> Iterator[_Trip]:
        """Yield the trips of names (default: all that are not resident), each once."""
        names = list(self._away) if names is None else list(names)
        for name in names:
            assert name in self._away, f"{name} is not out"
        yield from {id(self._away[name]): self._away[name] for name in names}.values()

    def _regions(self, sizes: list[int]) -> list[torch.Tensor]:
        # Pinning more memory takes longer than waiting for the copies that still read host regions.
        if self._returning and not self.pool.fits(sizes):
            for trip in list(self._returning.values()):
                self._settle(trip)
        return self.pool.take(sizes)

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Queue one copy in pieces; return the event behind it."""
        with self._device.on_stream(stream):
            for into, part in zip(target.split(self._bucket_bytes), source.split(self._bucket_bytes), strict=True):
                into.copy_(part, non_blocking=True)
        event = self._device.event()
        event.record(stream)
        return event

    def _arrived(self, trip: _Trip) -> None:
        trip.storage.resize_(0)
        trip.copied = None

    def _settle(self, trip: _Trip) -> None:
        trip.copied.synchronize()
        self.pool.give([self._returning.pop(trip.key).host])


def _bytes_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as uint8."""
    nbytes, itemsize = tensor.untyped_storage().nbytes(), tensor.element_size()
    assert nbytes % itemsize == 0, f"{name}: {nbytes} bytes of storage are no multiple of {itemsize}"
    return tensor.detach().as_strided((nbytes // itemsize,), (1,), 0).view(torch.uint8)
