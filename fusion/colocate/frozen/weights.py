"""Load and release the weights of a frozen model (reference, reward model) on a card that also trains.

    pinned host memory, allocated once ──load──► HBM, with the actor or instead of it ──release──► no copy back

`residency` chooses between the two. When they replace the actor's weights, the two are exchanged unit by unit, in an
order that needs no more memory than the larger of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fusion.colocate.frozen.residency import Residency, exchange_order
from fusion.model import Buckets
from fusion.npu import Device
from fusion.offload import HostPool, Offloader


class FrozenWeights:
    """``weights`` and their copy on the host. They must be in HBM at construction, which releases them.

    Invariant: outside `in_hbm` they are in HBM if and only if the residency is `all`."""

    def __init__(self, weights: Buckets, device: Device, pool: HostPool):
        self.weights, self._device, self._stream = weights, device, device.new_stream()
        self._host = pool.take([flat.nbytes for flat in weights.flats])
        self._stream.wait_stream(device.current_stream())
        with device.on_stream(self._stream):
            for host, flat in zip(self._host, weights.flats, strict=True):
                host.copy_(flat.view(torch.uint8), non_blocking=True)
        self._stream.synchronize()
        self.weights.release()
        self._is_resident = False

    def make_resident(self) -> None:
        for index in range(len(self._host)):
            self._load(index)
        self._wait_for_load()
        self._is_resident = True

    @contextmanager
    def in_hbm(self, residency: Residency, actor: Buckets, offloader: Offloader) -> Iterator[None]:
        """Keep the weights in HBM during the block; with residency ``one``, the actor's weights are not in HBM."""
        if residency == "all":
            assert self._is_resident
            yield
            return
        leaving = {f"actor.{index}": flat for index, flat in enumerate(actor.flats)} if residency == "one" else {}
        names = list(leaving)
        offloader.out(leaving)
        sizes = [flat.nbytes for flat in leaving.values()]
        for way, index in exchange_order(sizes, [host.numel() for host in self._host]):
            if way == "in":
                self._load(index)
            else:
                offloader.wait([names[index]])
        self._wait_for_load()
        try:
            yield
        finally:
            self.weights.release()
            offloader.back(names)
            offloader.wait(names)

    def _load(self, index: int) -> None:
        self.weights.allocate(index)
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on_stream(self._stream):
            self.weights.flats[index].view(torch.uint8).copy_(self._host[index], non_blocking=True)

    def _wait_for_load(self) -> None:
        self._device.current_stream().wait_stream(self._stream)
