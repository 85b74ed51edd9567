"""Tensors leave HBM for the host and come back, bit for bit, under every view that was made of them.

    resident ──out──► copied to the pool, storage of 0 bytes ──back──► resident, the same tensor objects

What moves is the storage: parameters, flat buckets and their views all keep working after `back`, and none of them may
be read in between. Gradients are not for here: their content is dead once the optimizer has stepped, so their storage
is released without a copy (`Buckets.release`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fusion.npu import Device
from fusion.offload.pool import HostPool


@dataclass
class _Away:
    """One storage on the host and the names of the tensors that lie in it."""

    content: torch.Tensor
    """The whole storage on the device as uint8."""
    host: torch.Tensor
    names: list[str]


class Offloader:
    """Moves the storage of named tensors between the card and a `HostPool`.

    Copies run on a stream of their own, after what the current stream has queued. Both directions return when the
    copies are done: nothing else may happen to the memory before.
    """

    def __init__(self, device: Device, pool: HostPool | None = None):
        self._device = device
        self.pool = pool if pool is not None else HostPool(device)
        self._stream = device.new_stream()
        self._away: dict[str, _Away] = {}

    def out(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies the storage of each tensor to the host and frees it on the card.

        Several tensors may share a storage: it travels once, and they go and come together. The pool knows a storage by
        the first of its names. Nothing is freed unless everything could be copied.
        """
        leaving: dict[int, _Away] = {}
        for name, tensor in tensors.items():
            assert name not in self._away, f"{name} is out already"
            storage = tensor.untyped_storage()
            assert tensor.device == self._device.torch_device, f"{name} lies on {tensor.device}, not on the card"
            assert tensor.numel() == 0 or storage.nbytes() > 0, f"{name} holds no storage: it was released or is out"
            if storage.nbytes() == 0:
                continue
            if storage.data_ptr() not in leaving:
                content = _bytes_of(name, tensor)
                leaving[storage.data_ptr()] = _Away(content, self.pool.buffer(name, content.numel()), [])
            leaving[storage.data_ptr()].names.append(name)
        self._copy([(away.host, away.content) for away in leaving.values()])
        for away in leaving.values():
            away.content.untyped_storage().resize_(0)
            self._away.update(dict.fromkeys(away.names, away))

    def back(self, names: Iterable[str] | None = None, owner: str = "optimizer") -> None:
        """Takes memory for the named tensors (default: all that are out) again and copies their content in.

        Args:
            owner: of `fusion.npu`'s OWNERS, to whom the memory is attributed.

        Raises:
            torch.OutOfMemoryError: no room; what is out stays out and can be asked for again.
        """
        names = list(self._away) if names is None else list(names)
        for name in names:
            assert name in self._away, f"{name} is not out"
        returning = list({id(self._away[name]): self._away[name] for name in names}.values())
        with self._device.owner(owner):
            for away in returning:
                away.content.untyped_storage().resize_(away.content.numel())
        self._copy([(away.content, away.host) for away in returning])
        for away in returning:
            for name in away.names:
                del self._away[name]

    def resident(self, name: str) -> bool:
        """Whether the tensor is not out."""
        return name not in self._away

    @property
    def host_bytes(self) -> int:
        """Bytes that are out at present (`pool.nbytes`: what the pool holds)."""
        return sum(away.host.numel() for away in {id(away): away for away in self._away.values()}.values())

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on_stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()


def _bytes_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under a tensor, as uint8."""
    nbytes, itemsize = tensor.untyped_storage().nbytes(), tensor.element_size()
    assert nbytes % itemsize == 0, f"{name}: {nbytes} bytes of storage are no multiple of {itemsize}"
    return tensor.detach().as_strided((nbytes // itemsize,), (1,), 0).view(torch.uint8)
