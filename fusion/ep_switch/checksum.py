"""Compute checksums of weights that do not depend on the layout.

    checksum of a box = Σ over its elements  bits(element) · weight(global tensor, global index)   mod 2^64

``weight`` is an odd number mixed from the tensor's name and the element's global index. A changed element therefore
always changes the sum (an odd factor is invertible mod 2^64), exchanged elements change it except with a probability of
about 2^-64, and the sums of boxes add up to the sum of the tensor, however it is cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusion.model.boxes import Box
from fusion.model.holder import WeightHolder
from fusion.npu.all_or_none import all_or_none, gather_json

_CHUNK = 1 << 18
"""Elements hashed at once: bounds the int64 temporaries to a few MB."""

NO_SUM = -(1 << 63)
"""Stands for the checksum of data that was never packed."""

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRIDES = (0x9E3779B97F4A7C1, 0xC2B2AE3D27D4EB5, 0x165667B19E3779F)
_MIX = 0x2545F4914F6CDD1D


def box_checksum(view: torch.Tensor, name: str, region: Box) -> torch.Tensor:
    """Compute the checksum of the elements ``region`` of the global tensor ``name``: 0-dim int64 on the view's device.

    Args:
        view: the elements in the global orientation, any dtype of 1, 2, 4 or 8 bytes; the sum is over its bits.
    """
    assert tuple(view.shape) == tuple(stop - start for start, stop in region)
    view = view.detach().reshape(1) if view.dim() == 0 else view.detach()
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    device, columns = view.device, torch.zeros((), dtype=torch.int64, device=view.device)
    for d, (start, stop) in enumerate(region[1:], start=1):
        columns = columns.unsqueeze(-1) + torch.arange(start, stop, device=device) * _STRIDES[d]
    total = torch.zeros((), dtype=torch.int64, device=device)
    first = region[0][0] if region else 0
    rows = max(1, _CHUNK // max(1, columns.numel()))
    for row in range(0, view.shape[0], rows):
        piece = view[row : row + rows].contiguous()
        bits = piece.view(_INTEGER[piece.element_size()]).to(torch.int64)
        index = torch.arange(first + row, first + row + piece.shape[0], device=device) * _STRIDES[0] + seed
        weights = index.view(-1, *(1 for _ in region[1:])) + columns
        weights = (weights ^ (weights >> 31)) * _MIX
        total += (bits * ((weights ^ (weights >> 29)) | 1)).sum()
    return total


def run_sums(wire: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Compute the checksums of the runs [0, ends[0]), [ends[0], ends[1]), … of a wire buffer, int64 [len(ends)].

    Σ bits(element) · weight(index on the wire) mod 2^64 of every run, as differences of one running sum: the number of
    operations does not depend on the number of runs.

    Args:
        wire: [numel] contiguous, any dtype of 1, 2, 4 or 8 bytes.
    """
    bits, device = wire.view(_INTEGER[wire.element_size()]), wire.device
    marks = torch.tensor([0, *ends], device=device)
    running = torch.zeros(len(ends) + 1, dtype=torch.int64, device=device)
    before = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, wire.numel(), _CHUNK):
        piece = bits[start : start + _CHUNK].to(torch.int64)
        index = torch.arange(start, start + piece.numel(), device=device) * _STRIDES[0]
        sums = (piece * (((index ^ (index >> 31)) * _MIX) | 1)).cumsum(0) + before
        inside = (marks > start) & (marks <= start + piece.numel())
        running = torch.where(inside, sums[(marks - start - 1).clamp(0, piece.numel() - 1)], running)
        before = sums[-1]
    return running.diff()


def weights_checksum(model: WeightHolder, dtype: torch.dtype | None = None) -> int:
    """Compute a 64-bit checksum that is equal for equal weights in any layout. Collective over the model's mesh. What
    lies on the host of the ranks that train is left out.

    Args:
        dtype: dtype that the weights are converted to first (default: their own), to compare a float32 trainer with a
            bfloat16 engine.

    Raises:
        AbortedOnAllRanks: a rank could not compute its sums.
        RuntimeError: on every rank, if replicas of a part differ (names the parameter and the ranks of the mesh).
    """
    group = model.mesh.world_group
    rank = dist.get_rank() if group is not None else model.mesh.rank
    sums = all_or_none(lambda: _box_sums(model, dtype), group=group, rank=rank, stage="weights checksum")
    holders: dict[tuple[str, Box], tuple[int, int]] = {}
    for rank, sums_of_rank in enumerate(gather_json(sums, group)):
        for name, region, value in sums_of_rank:
            box = tuple([tuple(bounds) for bounds in region])
            holder, expected = holders.setdefault((name, box), (rank, value))
            if value != expected:
                raise RuntimeError(f"ranks {holder} and {rank} hold different values of {name} {list(box)}")
    return sum(value for _, value in holders.values()) % (1 << 64)


def _box_sums(model: WeightHolder, dtype: torch.dtype | None) -> list[tuple[str, Box, int]]:
    """Return (global tensor, box, checksum) of every part that this rank holds."""
    sums = []
    with torch.no_grad():
        for param in (param for param in model.table if param.storage != "host"):
            compared = torch.float32 if param.float32 else dtype or model.weights.dtype
            for part in param.parts:
                view = part.view(model.weights.views[param.name]).to(compared)
                sums.append((part.name, part.region, int(box_checksum(view, part.name, part.region))))
    return sums
