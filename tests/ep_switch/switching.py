"""Both ends of a switch on one rank: models of any layout, values that name their element, and what must hold after."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusion.ep_switch import Layout, Plan, Switcher, SwitchReport
from fusion.ep_switch.exchange import Kind
from fusion.model import Buckets, Mesh, ModelConfig, Parallel, Transformer
from fusion.model.formats import EMBEDDED, STACKED, Format
from fusion.npu import Device
from fusion.npu.operators import operators_of
from tests.stacked import Stacked

BUCKET = 1 << 14


@dataclass(frozen=True)
class End:
    """A layout of one end: a grid that is repeated over ``ranks``, each repetition an engine of its own."""

    parallel: Parallel
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    dtype: torch.dtype = torch.float32
    format: Format = EMBEDDED

    def layout(self, config: ModelConfig) -> Layout:
        return Layout(config, self.parallel, self.ranks, self.dtype, BUCKET, self.format)


def build(layout: Layout, device: Device, share: Buckets | None = None, resident: bool = True) -> Transformer | None:
    """This rank's model, None where the layout does not reach it. Collective."""
    size, mine = layout.parallel.world, None
    for first in range(0, len(layout.ranks), size):
        ranks = layout.ranks[first : first + size]
        mesh = Mesh.create(layout.parallel, ranks) if dist.is_initialized() else Mesh.single()
        if mesh.rank >= 0:
            mine = mesh
    if mine is None:
        return None
    device.operators = Stacked() if layout.format == STACKED else operators_of(device.kind)
    return Transformer(
        layout.config,
        mine,
        device,
        layout.dtype,
        bucket_bytes=layout.bucket_bytes,
        share=share,
        resident=resident,
    )


def build_pair(source: Layout, target: Layout, device: Device) -> list[Transformer | None]:
    """Source and target; the source filled, the target without memory of its own."""
    first = build(source, device)
    second = build(target, device, share=first.weights if first else None, resident=False)
    if first is not None:
        fill(first)
    return [first, second]


def execute(
    plan: Plan,
    source: Transformer | None,
    target: Transformer | None,
    *,
    device: Device,
    group: dist.ProcessGroup | None = None,
    checksum: bool = False,
    exchange: Kind = "auto",
) -> SwitchReport:
    """A single switch by a plan."""
    return Switcher(plan, source, target, device=device, group=group, exchange=exchange).run(checksum)


def element_values(name: str, region, dtype: torch.dtype) -> torch.Tensor:
    """A value for every element of a global tensor, from its name and index alone."""
    total = torch.full([stop - start for start, stop in region], float(sum(name.encode()) % 97), dtype=torch.float64)
    for d, (start, stop) in enumerate(region):
        shape = [-1 if e == d else 1 for e in range(len(region))]
        total += torch.sin(torch.arange(start, stop, dtype=torch.float64) * (d + 1.7)).view(shape) * (d + 1)
    return total.to(torch.float32).to(dtype)


def fill(model: Transformer) -> None:
    for param in model.table:
        for part in param.parts:
            values = element_values(part.name, part.region, torch.float32 if param.float32 else model.weights.dtype)
            part.view(model.weights.views[param.name]).copy_(values)


def assert_filled(model: Transformer | None, via: torch.dtype) -> None:
    for param in model.table if model else ():
        for part in param.parts:
            dtypes = (torch.float32, torch.float32) if param.float32 else (via, model.weights.dtype)
            want = element_values(part.name, part.region, dtypes[0]).to(dtypes[1])
            assert torch.equal(part.view(model.weights.views[param.name]).cpu(), want), part.name


def own_bytes(model: Transformer | None, shared) -> int:
    """Bytes that a model holds in units it does not share."""
    flats = model.weights.flats if model else []
    return sum(flat.untyped_storage().nbytes() for index, flat in enumerate(flats) if index not in shared)


def assert_bound(plan: Plan, rank: int, report: SwitchReport, peak_bytes: int) -> None:
    """Weights and wire buffers at the peak, against the plan's figure and against the bound.

    Args:
        peak_bytes: by the allocator's own counter, less what others than the two models hold.
    """
    units = len(plan.source.units(rank)) + len(plan.target.units(rank)) + 4
    rounding = 512 * units  # the allocator's granule
    both = plan.source.nbytes(rank), plan.target.nbytes(rank)
    most = sum(both) if plan.keep and all(both) else max(both)
    assert peak_bytes <= plan.peak_bytes(rank) + rounding
    assert peak_bytes <= most + 4 * plan.bucket_bytes + rounding
    assert abs(report.peak_bytes - peak_bytes) <= rounding
    assert report.peak_reserved >= report.peak_bytes
