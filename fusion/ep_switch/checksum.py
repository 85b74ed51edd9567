"""Compare what was moved by checksums: of runs on the wire, and of all weights, whatever their layout is
(`fusion/model/box_checksum.py`)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusion.model.box_checksum import CHUNK, MODULUS, PRIMES, as_halves, box_checksum, factors, num_halves
from fusion.model.boxes import Box
from fusion.model.holder import WeightHolder
from fusion.npu.all_or_none import all_or_none, gather_json

NO_SUM = -(1 << 63)
"""Stands for the checksum of data that was never packed."""

ROW = 1 << 10
"""Halves of a wire that are weighed by their place in a row"""

ROWS = CHUNK // ROW
"""Rows that are summed at once"""


def run_sums(wire: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Compute the checksums of the runs [0, ends[0]), [ends[0], ends[1]), … of a wire buffer, int64 [len(ends)].

    Σ bits(element) · weight(index on the wire) mod MODULUS of every run, as differences of one running sum: the number
    of operations does not depend on the number of runs. As in `box_checksum`, no value exceeds int64. The residues are
    combined as digits, as no sums are added up.
    ``wire``: [numel] contiguous, any dtype of 1, 2, 4 or 8 bytes."""
    halves, device, split = as_halves(wire), wire.device, num_halves(wire.dtype)
    width = max(split, min(ROW, halves.numel()))
    columns = factors(0, 0, width // split, num_halves=split).to(device)
    leading = factors(1, 0, -(-halves.numel() // width)).to(device)
    last = torch.tensor([0, *ends], device=device) * split - 1  # of the halves before each end
    running = torch.zeros(2, len(ends) + 1, dtype=torch.int64, device=device)
    before = [torch.zeros(1, dtype=torch.int64, device=device)] * 2
    for start in range(0, halves.numel(), ROWS * width):
        piece = halves[start : start + ROWS * width]
        piece = torch.nn.functional.pad(piece, (0, -piece.numel() % width)).view(-1, width)
        at = last - start
        inside = (at >= 0) & (at < piece.numel())
        at = at.clamp(0, piece.numel() - 1)
        for i, prime in enumerate(PRIMES):
            factor = leading[i, start // width :][: len(piece)]
            sums = piece.to(torch.int64).mul_(columns[i]).cumsum_(1)
            rows = torch.cat([before[i], sums[:, -1] % prime * factor % prime]).cumsum(0)
            here = sums.flatten()[at] % prime * factor[at // width] % prime + rows[at // width]
            running[i] = torch.where(inside, here, running[i])
            before[i] = rows[-1:] % prime
            del sums  # before the next prime's
    first, second = (running[i].diff() % prime for i, prime in enumerate(PRIMES))
    return first + second * PRIMES[0]


def weights_checksum(model: WeightHolder, base_only: bool = False) -> int:
    """Compute a checksum, below MODULUS, that is equal for equal weights in any layout; with ``base_only`` that of a
    frozen base. Collective over the model's mesh. What lies on the host of the ranks that train is left out.
    Raise AbortedOnAllRanks: a rank could not compute its sums.
    Raise RuntimeError: on every rank, if replicas of a part differ (names the parameter and the ranks of the mesh)."""
    group = model.mesh.world_group
    rank = dist.get_rank() if group is not None else model.mesh.rank
    sums = all_or_none(lambda: _box_sums(model, base_only), group=group, rank=rank, stage="weights checksum")
    holders: dict[tuple[str, Box], tuple[int, int]] = {}
    for rank, sums_of_rank in enumerate(gather_json(sums, group)):
        for name, region, value in sums_of_rank:
            box = tuple([tuple(bounds) for bounds in region])
            holder, expected = holders.setdefault((name, box), (rank, value))
            if value != expected:
                raise RuntimeError(f"ranks {holder} and {rank} hold different values of {name} {list(box)}")
    return sum(value for _, value in holders.values()) % MODULUS


def _box_sums(model: WeightHolder, base_only: bool) -> list[tuple[str, Box, int]]:
    """Return (global tensor, box, checksum) of every part that this rank holds."""
    sums = []
    with torch.no_grad():
        for param in model.table:
            if param.storage == "host" or (base_only and not param.frozen):
                continue
            for part in param.parts:
                view = part.view(model.weights.views[param.name])
                sums.append((part.name, part.region, box_checksum(view, part.name, part.region)))
    return sums
