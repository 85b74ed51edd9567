"""Both ends of a pair of layouts on one rank and their switch, measured: its time over all ranks, and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusion.ep_switch import Layout, Plan, SwitchError, plan_switch
from fusion.ep_switch.transfer import Switcher
from fusion.model import Buckets, LocalParam, ModelConfig, Parallel
from fusion.model.formats import EMBEDDED, Format
from fusion.npu import Device
from fusion.npu.failures import FailureKind
from tests.ep_switch.switching import element_values

BUCKETS_OF_A_SHARD = 16
BOUND_BUCKETS = 4


def wall(device: Device, work: Callable[[], object]) -> float:
    """Return the seconds from the first rank's start to the last rank's end, the same on every rank."""
    device.synchronize()
    dist.barrier()
    start = time.perf_counter()  # one clock for all processes of a machine
    work()
    device.synchronize()
    span = torch.tensor([-start, time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(span, op=dist.ReduceOp.MAX)
    return float(span.sum())


def worst(value: int) -> int:
    """Return the maximum over all ranks."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def fill(table: Iterable[LocalParam], views: Mapping[str, torch.Tensor]) -> None:
    """Write `element_values` into every parameter of ``table``. ``views``: its tensors by name."""
    for param in table:
        for part in param.parts:
            part.view(views[param.name]).copy_(element_values(part.name, part.region, views[param.name].dtype))


def check(table: Iterable[LocalParam], views: Mapping[str, torch.Tensor]) -> None:
    """Compare every parameter with the values of `fill`.

    Raises:
        AssertionError: elements differ; names their tensor and the rank.
    """
    for param in table:
        for part in param.parts:
            values = part.view(views[param.name]).cpu()
            want = element_values(part.name, part.region, values.dtype)
            assert torch.equal(values, want), f"rank {dist.get_rank()}: {part.name} differs"


@dataclass(frozen=True)
class Extra:
    """Bytes beyond max(A, B) at the peak of a switch, on the worst rank."""

    allocated: int
    reserved: int


class Pair:
    """Holds one model's weights in two layouts on the same ranks; one of the two is resident at a time."""

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        *,
        one: Parallel,
        other: Parallel,
        formats: tuple[Format, Format] = (EMBEDDED, EMBEDDED),
    ):
        self.device, self.rank = device, dist.get_rank()
        ranks = tuple(range(dist.get_world_size()))
        ends = tuple(zip((one, other), formats, strict=True))
        shard = max(Layout(config, grid, ranks, format=name).nbytes(rank) for grid, name in ends for rank in ranks)
        self.bucket_bytes = shard // BUCKETS_OF_A_SHARD
        self.layouts = [Layout(config, grid, ranks, bucket_bytes=self.bucket_bytes, format=name) for grid, name in ends]
        self.plans = [plan_switch(self.layouts[i], self.layouts[1 - i], self.bucket_bytes) for i in (0, 1)]
        first = Buckets(self.layouts[0].units(self.rank), device, torch.float32, owner="weights")
        second = Buckets(
            self.layouts[1].units(self.rank), device, torch.float32, owner="weights", share=first, resident=False
        )
        self.ends = [first, second]
        self.switchers = [self._switcher(i, self.plans[i]) for i in (0, 1)]
        self.refill(0)

    @property
    def larger(self) -> int:
        """Bytes of this rank's weights in the larger of both layouts, and of the largest external unit."""
        external = max(layout.external_nbytes(self.rank) for layout in self.layouts)
        return max(layout.nbytes(self.rank) for layout in self.layouts) + external

    def switch(self, source: int, plan: Plan | None = None) -> tuple[float, Extra]:
        """Switch from end ``source`` (0 or 1) to the other; return its seconds and memory.

        Raises:
            SwitchError: as `Switcher.run`; call `refill` before the next switch.
        """
        device, others = self.device, self._others(source)
        switcher = self._switcher(source, plan) if plan else self.switchers[source]
        device.reset_peak()
        seconds = wall(device, switcher.run)
        after = device.memory()
        peaks = after.peak_allocated, after.peak_reserved
        return seconds, Extra(*(worst(peak - others - self.larger) for peak in peaks))

    def _switcher(self, source: int, plan: Plan) -> Switcher:
        return Switcher(plan, self.ends[source], self.ends[1 - source], device=self.device)

    def refill(self, end: int) -> None:
        """Make ``end`` resident with the values of `fill` and release the other, from any state."""
        for buckets in self.ends:
            for index in range(len(buckets.flats)):
                buckets.release(index)
        for index in range(len(self.ends[end].flats)):
            self.ends[end].allocate(index)
        fill(self._params(end), self.ends[end].views)

    def verify(self, end: int) -> None:
        check(self._params(end), self.ends[end].views)

    def _params(self, end: int) -> list[LocalParam]:
        return [param for plan in self.ends[end].plans for param, _ in plan.entries]

    def fits_the_bound(self, source: int, plan: Plan | None = None) -> bool:
        """Return whether the switch succeeds on cards whose capacity is the bound plus what else they hold.

        Leaves the target end resident with the values of `fill`.
        """
        with self._capacity(self._others(source) + self.larger + BOUND_BUCKETS * self.bucket_bytes):
            try:
                self.switch(source, plan)
            except SwitchError as error:
                assert FailureKind.OUT_OF_MEMORY in {failure.kind for failure in error.failures}, error
                fits = False
            else:
                fits = True
        if fits:
            self.verify(1 - source)
        else:
            self.refill(1 - source)
        return fits

    def _others(self, resident: int) -> int:
        """Return the bytes allocated on the card that are not the pair's."""
        return self.device.memory().allocated - self.layouts[resident].nbytes(self.rank)

    @contextmanager
    def _capacity(self, nbytes: int) -> Iterator[None]:
        module, index = torch.get_device_module(self.device.torch_device), self.device.index
        self.device.empty_cache()
        module.set_per_process_memory_fraction(nbytes / self.device.memory().capacity, index)
        try:
            yield
        finally:
            module.set_per_process_memory_fraction(1.0, index)
