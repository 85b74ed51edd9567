"""Host memory that is taken once and kept: pinning pages costs more than copying them."""

from __future__ import annotations

import torch

from fusion.npu import Device


class HostPool:
    """Host buffers by name, pinned where the card can pin.

    Invariants: a name keeps its buffer, the same memory every time, until it asks for more bytes than it has; the pool
    never shrinks; `nbytes` is the sum of its buffers.
    """

    def __init__(self, device: Device):
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the host; the content is what ``name`` left there, or undefined."""
        held = self._buffers.get(name)
        if held is None or held.numel() < nbytes:
            held = self._buffers[name] = self._device.host_empty((nbytes,), torch.uint8)
        return held[:nbytes]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory the pool holds, in use or not."""
        return sum(buffer.numel() for buffer in self._buffers.values())
