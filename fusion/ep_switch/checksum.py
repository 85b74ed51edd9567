"""Compare what was moved by checksums: of runs on the wire, and of all weights, whatever their layout is
(`fusion/model/box_checksum.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusion.model.box_checksum import CHUNK, INTEGER, MIX, STRIDES, box_checksum
from fusion.model.boxes import Box
from fusion.model.holder import WeightHolder
from fusion.npu.all_or_none import all_or_none, gather_json

NO_SUM = -(1 << 63)
"""Stands for the checksum of data that was never packed."""


def run_sums(wire: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Compute the checksums of the runs [0, ends[0]), [ends[0], ends[1]), … of a wire buffer, int64 [len(ends)].

    Σ bits(element) · weight(index on the wire) mod 2^64 of every run, as differences of one running sum: the number of
    operations does not depend on the number of runs.

    Args:
        wire: [numel] contiguous, any dtype of 1, 2, 4 or 8 bytes.
    """
    bits, device = wire.view(INTEGER[wire.element_size()]), wire.device
    marks = torch.tensor([0, *ends], device=device)
    running = torch.zeros(len(ends) + 1, dtype=torch.int64, device=device)
    before = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, wire.numel(), CHUNK):
        piece = bits[start : start + CHUNK].to(torch.int64)
        index = torch.arange(start, start + piece.numel(), device=device) * STRIDES[0]
        sums = (piece * (((index ^ (index >> 31)) * MIX) | 1)).cumsum(0) + before
        inside = (marks > start) & (marks <= start + piece.numel())
        running = torch.where(inside, sums[(marks - start - 1).clamp(0, piece.numel() - 1)], running)
        before = sums[-1]
    return running.diff()


def weights_checksum(model: WeightHolder) -> int:
    """Compute a 64-bit checksum that is equal for equal weights in any layout. Collective over the model's mesh. What
    lies on the host of the ranks that train is left out.

    Raises:
        AbortedOnAllRanks: a rank could not compute its sums.
        RuntimeError: on every rank, if replicas of a part differ (names the parameter and the ranks of the mesh).
    """
    group = model.mesh.world_group
    rank = dist.get_rank() if group is not None else model.mesh.rank
    sums = all_or_none(lambda: _box_sums(model), group=group, rank=rank, stage="weights checksum")
    holders: dict[tuple[str, Box], tuple[int, int]] = {}
    for rank, sums_of_rank in enumerate(gather_json(sums, group)):
        for name, region, value in sums_of_rank:
            box = tuple([tuple(bounds) for bounds in region])
            holder, expected = holders.setdefault((name, box), (rank, value))
            if value != expected:
                raise RuntimeError(f"ranks {holder} and {rank} hold different values of {name} {list(box)}")
    return sum(value for _, value in holders.values()) % (1 << 64)


def _box_sums(model: WeightHolder) -> list[tuple[str, Box, int]]:
    """Return (global tensor, box, checksum) of every part that this rank holds."""
    sums = []
    with torch.no_grad():
        for param in (param for param in model.table if param.storage != "host"):
            for part in param.parts:
                view = part.view(model.weights.views[param.name])
                sums.append((part.name, part.region, int(box_checksum(view, part.name, part.region))))
    return sums
