"""Measure the floor of a switch: its bytes over the fastest available wire, and the copies that this wire requires.

    wire     the pair's byte matrix in one exchange, contiguous, between allocated and warm buffers:
             all_to_all   one `all_to_all_single` with uneven splits
             p2p          one batch of sends and receives, one message per pair of ranks
             shared       every rank reads its bytes from the sender's memory (cards of one machine), unpacked
    memcpy   one contiguous copy of the bytes that must be packed for `all_to_all` and `p2p`
    local    one contiguous copy of the bytes that stay on their rank but change storage

    floor = min(shared, min(all_to_all, p2p) + memcpy) + local

Not included: unpacking, allocating and freeing memory, and keeping order and bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.switch_clock import wall
from fusion.ep_switch import Plan
from fusion.npu import Device
from fusion.npu.all_or_none import gather_bytes


def floor_of(seconds: Mapping[str, float]) -> tuple[str, float]:
    """Return the fastest wire, including the packing that it requires, and the floor in seconds.

    ``seconds``: those of every wire, of `memcpy` and of `local`.
    """
    wires = {
        "all_to_all": seconds["all_to_all"] + seconds["memcpy"],
        "p2p": seconds["p2p"] + seconds["memcpy"],
        "shared": seconds["shared"],
    }
    wire = min(wires, key=lambda name: wires[name])
    return wire, wires[wire] + seconds["local"]


def byte_matrix(plan: Plan) -> list[list[int]]:
    """Return bytes as [source rank][target rank]; on the diagonal those copied within a rank."""
    size = max(plan.ranks) + 1
    matrix = [[0] * size for _ in range(size)]
    for round_ in plan.rounds:
        for move in round_.moves:
            itemsize = (plan.target.dtype if move.local else plan.wire_dtype).itemsize
            matrix[move.source_rank][move.target_rank] += move.numel * itemsize
    return matrix


class Floor:
    """Holds the buffers of one direction of a pair and measures the exchanges between them."""

    def __init__(self, device: Device, matrix: list[list[int]]):
        self.device, me, world = device, dist.get_rank(), len(matrix)
        self.sent = [0 if peer == me else matrix[me][peer] for peer in range(world)]
        self.received = [0 if peer == me else matrix[peer][me] for peer in range(world)]
        self.moved = sum(nbytes for i, row in enumerate(matrix) for j, nbytes in enumerate(row) if i != j)
        """Bytes sent between ranks, summed over all ranks."""
        self.packed, self.local = sum(self.sent), matrix[me][me]
        """Bytes that this rank sends, and that it copies within itself."""
        with device.owner("buckets"):
            self.send = torch.zeros(max(sum(self.sent), 1), dtype=torch.uint8, device=device.torch_device)
            self.receive = torch.zeros(max(sum(self.received), 1), dtype=torch.uint8, device=device.torch_device)
            self.copy_source, self.copy_target = (
                torch.zeros(sum(matrix[me]), dtype=torch.uint8, device=device.torch_device) for _ in range(2)
            )
        handles = gather_bytes(device.share(self.send), dist.group.WORLD)
        self.mapped = {peer: device.map(handles[peer]) for peer, nbytes in enumerate(self.received) if nbytes}
        """Send buffers of other ranks, by rank."""
        self.peers = self._peers(matrix, me)
        self.wires: dict[str, Callable[[], Any]] = {
            "all_to_all": self._all_to_all,
            "p2p": self._p2p,
            "shared": self._shared,
        }
        self.seconds: dict[str, list[float]] = {name: [] for name in (*self.wires, "memcpy", "local")}

    def _peers(self, matrix: list[list[int]], me: int) -> list[torch.Tensor]:
        """Return this rank's bytes in every rank's send buffer, as views of it."""
        pieces = []
        for peer, row in enumerate(matrix):
            start = sum(nbytes for other, nbytes in enumerate(row[:me]) if other != peer)
            pieces.append(self.mapped[peer][start : start + row[me]] if peer in self.mapped else self.send[:0])
        return pieces

    def measure(self, keep: bool) -> None:
        """Run every wire and copy once; record the seconds if ``keep``."""
        works = self.wires | {
            "memcpy": lambda: self.copy_target[: self.packed].copy_(self.copy_source[: self.packed]),
            "local": lambda: self.copy_target[self.packed :].copy_(self.copy_source[self.packed :]),
        }
        for name, work in works.items():
            seconds = wall(self.device, work)
            if keep:
                self.seconds[name].append(seconds)

    def _all_to_all(self) -> None:
        dist.all_to_all_single(
            self.receive[: sum(self.received)], self.send[: sum(self.sent)], self.received, self.sent
        )

    def _p2p(self) -> None:
        operations = [
            dist.P2POp(kind, piece, peer)
            for kind, buffer, sizes in ((dist.irecv, self.receive, self.received), (dist.isend, self.send, self.sent))
            for peer, piece in enumerate(buffer[: sum(sizes)].split(sizes))
            if piece.numel()
        ]
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()

    def _shared(self) -> None:
        pieces = self.receive[: sum(self.received)].split(self.received)
        for into, piece in zip(pieces, self.peers, strict=True):
            into.copy_(piece)
