"""The storage a switch works on: both ends' buckets, held against their layouts, and the buffers between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fusion.ep_switch.layout import Layout
from fusion.ep_switch.moves import Move
from fusion.ep_switch.plan import Plan
from fusion.model.transformer import Transformer
from fusion.model.weights import Buckets
from fusion.npu import Device

Holder = Transformer | Buckets | None
"""A model, its buckets, or None on a rank that has no share in that end of the switch."""


def buckets_of(holder: Holder, layout: Layout, rank: int, resident: bool) -> Buckets | None:
    """The buckets of one end of a switch, after holding them against the layout the plan was made from.

    Raises:
        AssertionError: other parameters, bucket bounds or dtype than the layout's, or storage that is not there
            (``resident``) or is there although it must be empty.
    """
    buckets = holder.weights if isinstance(holder, Transformer) else holder
    if buckets is None:
        assert rank not in layout.ranks, f"rank {rank} has a share in {layout}, but brought no buckets"
        return None
    found = [[(param.name, param.shape, offset) for param, offset in plan.entries] for plan in buckets.plans]
    expected = [[(param.name, param.shape, offset) for param, offset in plan.entries] for plan in layout.buckets(rank)]
    assert found == expected, f"the buckets of rank {rank} are not those of {layout}"
    assert buckets.dtype == layout.dtype, f"the buckets of rank {rank} hold {buckets.dtype}, the layout {layout.dtype}"
    held = resident_bytes(buckets)
    if resident:
        assert buckets.resident, f"the weights of rank {rank} in {layout} are not resident: nothing to switch from"
    else:
        assert held == 0, f"rank {rank} holds {held} bytes in {layout} already: release the target before the switch"
    return buckets


def resident_bytes(buckets: Buckets) -> int:
    """Bytes of storage the buckets hold at present."""
    return sum(flat.untyped_storage().nbytes() for _, flat in buckets)


class WireBuffers:
    """Send and receive buffer of one rank, of the size of the largest round, taken once for a whole switch.

    Moves lie in them one after the other, by peer in the order of the group's ranks; both ends of a pair have their
    moves in the same order.
    """

    def __init__(self, plan: Plan, rank: int, peers: list[int], device: Device):
        self.peers, self.itemsize = peers, plan.wire_dtype.itemsize
        self.send, self.receive = (
            self._take(nbytes // self.itemsize, plan.wire_dtype, device) for nbytes in plan.wire_bytes(rank)
        )

    @staticmethod
    def _take(numel: int, dtype: torch.dtype, device: Device) -> torch.Tensor:
        with device.owner("buckets"):
            return torch.zeros(numel, dtype=dtype, device=device.torch_device)

    def slots(self, buffer: torch.Tensor, moves: Mapping[int, tuple[Move, ...]]) -> Iterator[tuple[Move, torch.Tensor]]:
        """Every move of a round with its place in a buffer, in the shape of its region."""
        offset = 0
        for peer in self.peers:
            for move in moves.get(peer, ()):
                shape = [stop - start for start, stop in move.region]
                yield move, buffer[offset : offset + move.numel].view(shape)
                offset += move.numel

    def splits(self, moves: Mapping[int, tuple[Move, ...]]) -> list[int]:
        """Bytes for, or from, each peer."""
        return [sum(move.numel for move in moves.get(peer, ())) * self.itemsize for peer in self.peers]

    def free(self) -> None:
        for buffer in (self.send, self.receive):
            buffer.untyped_storage().resize_(0)
