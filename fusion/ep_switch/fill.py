"""Fill units of the target that no rank sends from this rank's own host memory, concurrently with the rounds.

    host, pinned     │ master.0 ░░░│ master.1 ░░░ │             flat float32: the optimizer's masters
      separate stream   ▼ copy, in pieces of the staging buffer
    staging          │░░│                                       `Plan.staging_bytes`, HBM
                        ▼ round to the target's dtype
    unit of target   │ input_norm ░░│ qkv ░░░░░ │ router … │    `Plan.hosted`, storage allocated in its round

The host link is used in parallel with the wire and with the copies of the rounds, which are on the caller's stream."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusion.ep_switch.segment import TransferError
from fusion.model.weights import Buckets
from fusion.npu import Device


class HostPart(NamedTuple):
    """Map contiguous elements of the parameter ``name``: from ``start`` on in a unit of the target, and in host memory
    as ``values``, flat float32, pinned so that copies do not block."""

    name: str
    start: int
    values: torch.Tensor


HostParts = Mapping[int, Sequence[HostPart]]
"""Unit of the target → its parts, which cover every parameter stored in it."""


class HostFill:
    """Fill the hosted units of a rank, for any number of switches."""

    def __init__(self, device: Device):
        self._device = device
        self._stream: Any = None
        self._staging = torch.empty(0)
        self._target: Buckets | None = None
        self._parts: HostParts = {}

    def open(self, target: Buckets | None, units: Sequence[int], parts: HostParts, staging_bytes: int) -> None:
        """Begin a switch: allocate the staging buffer, if there are units to fill.
        Raise AssertionError: ``parts`` are not those of the hosted units, or do not cover them."""
        assert set(parts) == set(units), f"the plan has the units {sorted(units)} hosted, not {sorted(parts)}"
        for unit in units:
            assert target is not None
            needed = sum(param.numel for param, _ in target.plans[unit].entries)
            provided = sum(part.values.numel() for part in parts[unit])
            assert provided == needed, f"unit {unit} has {needed} elements, the host provides {provided}"
        self._target, self._parts = target, parts
        if units:
            self._stream = self._stream or self._device.new_stream()
            with self._device.owner("buckets"):
                self._staging = torch.empty(staging_bytes // 4, dtype=torch.float32, device=self._device.torch_device)

    def fill(self, unit: int) -> None:
        """Start filling a unit, if it is hosted, after all work queued on the current stream: the unit's memory was
        just allocated there, and earlier work may still use it.
        Raise TransferError: a copy failed (names the parameter)."""
        if unit not in self._parts:
            return
        assert self._target is not None
        flat = self._target.flats[unit]
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on_stream(self._stream):
            for name, start, values in self._parts[unit]:
                try:
                    self._copy(flat[start : start + values.numel()], values)
                except Exception as error:
                    raise TransferError(name, str(error)) from error

    def close(self) -> None:
        """Make the current stream wait for the copies, and release the staging buffer."""
        if self._parts:
            self._device.current_stream().wait_stream(self._stream)
            self._staging.untyped_storage().resize_(0)
        self._target, self._parts = None, {}

    def _copy(self, into: torch.Tensor, values: torch.Tensor) -> None:
        piece_numel = self._staging.numel()
        for piece, part in zip(into.split(piece_numel), values.split(piece_numel), strict=True):
            # Rounded on the card: in a converting copy PyTorch would round on the host, in memory that is not pinned.
            staged = self._staging[: part.numel()]
            staged.copy_(part, non_blocking=True)
            piece.copy_(staged)
