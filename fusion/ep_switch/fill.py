"""Fills units of the target that no rank sends from this rank's own host memory, beside the rounds.

    host, pinned     │ master.0 ░░░│ master.1 ░░░ │             flat float32: where the optimizer's masters wait
      stream of its own ▼ copy, in pieces of the staging buffer
    staging          │░░│                                       `Plan.staging_bytes`, HBM
                        ▼ round to the target's dtype
    unit of target   │ input_norm ░░│ qkv ░░░░░ │ router … │    `Plan.hosted`, storage taken in its round

The host link works beside the wire and beside the copies of the rounds, which are on the caller's stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusion.ep_switch.segment import TransferError
from fusion.model.weights import Buckets
from fusion.npu import Device


class HostPart(NamedTuple):
    """Elements of the parameter ``name`` that lie one after the other: in a unit of the target from ``start`` on, and
    in host memory as ``values``, flat float32, pinned for a copy that does not block."""

    name: str
    start: int
    values: torch.Tensor


HostParts = Mapping[int, Sequence[HostPart]]
"""Unit of the target → its parts, which cover every parameter that lies in it."""


class HostFill:
    """Fills the hosted units of a rank, in one switch after the other."""

    def __init__(self, device: Device):
        self._device = device
        self._stream: Any = None
        self._staging = torch.empty(0)
        self._target: Buckets | None = None
        self._parts: HostParts = {}

    def open(self, target: Buckets | None, units: Sequence[int], parts: HostParts, staging_bytes: int) -> None:
        """Begins a switch: takes the staging buffer, if anything is to be filled.

        Raises:
            AssertionError: ``parts`` are not those of the hosted units, or leave something of them out.
        """
        assert set(parts) == set(units), f"the plan has the units {sorted(units)} hosted, not {sorted(parts)}"
        for unit in units:
            assert target is not None
            needed = sum(param.numel for param, _ in target.plans[unit].entries)
            brought = sum(part.values.numel() for part in parts[unit])
            assert brought == needed, f"unit {unit} has {needed} elements, the host brought {brought}"
        self._target, self._parts = target, parts
        if units:
            self._stream = self._stream or self._device.new_stream()
            with self._device.owner("buckets"):
                self._staging = torch.empty(staging_bytes // 4, dtype=torch.float32, device=self._device.torch_device)

    def fill(self, unit: int) -> None:
        """Starts to fill a unit, if it is hosted, behind all that the current stream holds: the unit's memory was just
        taken there, and earlier work may still use it.

        Raises:
            TransferError: with the parameter whose copy failed.
        """
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
        """Makes the current stream wait for what was filled, and releases the staging buffer."""
        if self._parts:
            self._device.current_stream().wait_stream(self._stream)
            self._staging.untyped_storage().resize_(0)
        self._target, self._parts = None, {}

    def _copy(self, into: torch.Tensor, values: torch.Tensor) -> None:
        room = self._staging.numel()
        for piece, part in zip(into.split(room), values.split(room), strict=True):
            # On the card, not on the way: PyTorch would round on the host, in memory that is not pinned.
            staged = self._staging[: part.numel()]
            staged.copy_(part, non_blocking=True)
            piece.copy_(staged)
