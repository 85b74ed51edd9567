"""Compute checksums of weights that do not depend on the layout.

    checksum of a box = Σ over its elements  bits(element) · weight(global tensor, global index)   mod 2^64

``weight`` is an odd number mixed from the tensor's name and the element's global index. A changed element therefore
always changes the sum (an odd factor is invertible mod 2^64), exchanged elements change it except with a probability of
about 2^-64, and the sums of boxes add up to the sum of the tensor, however it is cut.
"""

from __future__ import annotations

import hashlib

import torch

from fusion.model.boxes import Box

CHUNK = 1 << 18
"""Elements hashed at once: bounds the int64 temporaries to a few MB."""

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STRIDES = (0x9E3779B97F4A7C1, 0xC2B2AE3D27D4EB5, 0x165667B19E3779F)
MIX = 0x2545F4914F6CDD1D


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
        columns = columns.unsqueeze(-1) + torch.arange(start, stop, device=device) * STRIDES[d]
    total = torch.zeros((), dtype=torch.int64, device=device)
    first = region[0][0] if region else 0
    rows = max(1, CHUNK // max(1, columns.numel()))
    for row in range(0, view.shape[0], rows):
        piece = view[row : row + rows].contiguous()
        bits = piece.view(INTEGER[piece.element_size()]).to(torch.int64)
        index = torch.arange(first + row, first + row + piece.shape[0], device=device) * STRIDES[0] + seed
        weights = index.view(-1, *(1 for _ in region[1:])) + columns
        weights = (weights ^ (weights >> 31)) * MIX
        total += (bits * ((weights ^ (weights >> 29)) | 1)).sum()
    return total
