"""Gather samples from many segments into one batch: every byte is copied once, directly into the reader's buffer.
A client views the gathered bytes as tensors (`columns.py`); a shard sends them to a reader of another node (`wire.py`).

    Runs      of the part: which rows of which source; the same for all its columns
    Spans     the elements of these rows, for columns of equal lengths
    ColumnPlan      the bytes of these elements, for one column

What came from a segment is verified against its checksums (`checksums.py`): every block of which a sample was copied,
once, in the reader's memory if the whole block was copied there.

Long runs of neighbouring samples are copied run by run. If samples are short and in another order, runs of one sample
would cost more in Python than in bytes; then elements are gathered by index, which columns of equal lengths share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distqueue.messages import DeliveryPart, offsets_of
from distqueue.payload.buffers import ALIGN, BufferPool, copy_all
from distqueue.payload.checksums import Blocks, sum_all
from distqueue.payload.segment_file import Stretch

MIN_RUN_ELEMENTS = 128
"""Mean length of the runs from which they are copied run by run"""
LONG_RUN_BYTES = 1 << 14
"""Mean bytes of the runs from which their copies are shared among threads"""
Indices = np.ndarray | slice
"""Positions in an array: a slice where they are all of it, in order"""


class SourcesDamaged(RuntimeError):
    """Bytes that were gathered differ from their checksums. `sources`: indices of those they came from."""

    def __init__(self, sources: Sequence[int]) -> None:
        super().__init__(f"sources {list(sources)}: their checksums differ")
        self.sources = tuple(sources)


def gather(
    parts: Sequence[DeliveryPart], sources: Sequence[Mapping[str, Stretch]], buffers: BufferPool
) -> dict[str, Stretch]:
    """Gather all columns of all parts into one buffer; the runs of a part index `sources`. SourcesDamaged: the bytes
    of a source differ from its checksums, or were overwritten while they were copied."""
    plans = {name: plan for part in parts for name, plan in _plans(part, sources)}
    starts, size = {}, 0
    for name, plan in plans.items():
        starts[name] = size
        size += plan.nbytes + -plan.nbytes % ALIGN
    memory = buffers.take(size)
    gathered = {}
    long: list[tuple[np.ndarray, np.ndarray]] = []
    for name, plan in plans.items():
        target = memory[starts[name] : starts[name] + plan.nbytes]
        long += plan.copy_into(target)
        gathered[name] = Stretch(plan.stretches[0].layout, target, plan.spans.offsets)
    copy_all(long)
    _verify([check for name, plan in plans.items() for check in plan.checks(gathered[name].data)])
    return gathered


def _plans(part: DeliveryPart, sources: Sequence[Mapping[str, Stretch]]) -> "Iterator[tuple[str, ColumnPlan]]":
    runs, spans_of = Runs(part.runs), dict[tuple[int, ...], Spans]()
    for name in part.columns:
        assert all(name in sources[source] for source in runs.sources), "a segment lacks a column"
        stretches = [sources[source][name] for source in runs.sources]
        tables = [stretch.offsets for stretch in stretches]
        key = tuple(map(id, tables))
        if key not in spans_of:
            spans_of[key] = Spans(runs, tables)
        yield name, ColumnPlan(runs, spans_of[key], stretches)


class BlockCheck(NamedTuple):
    """Blocks of a source and their checksums."""

    source: int
    blocks: list[memoryview]
    expected: np.ndarray


def _verify(checks: Sequence[BlockCheck]) -> None:
    if not checks:
        return
    wrong = sum_all([data for check in checks for data in check.blocks]) != np.concatenate([c.expected for c in checks])
    if wrong.any():
        sources = np.repeat([check.source for check in checks], [len(check.blocks) for check in checks])
        raise SourcesDamaged(np.unique(sources[wrong]).tolist())


class Runs:
    """The rows of a batch: K runs of neighbours."""

    def __init__(self, runs: np.ndarray) -> None:
        self.starts, self.stops = runs[:, 1], runs[:, 2]
        self.sizes = self.stops - self.starts
        sources, self.which, counts = np.unique(runs[:, 0], return_inverse=True, return_counts=True)
        self.sources: list[int] = sources.tolist()
        """Sources that occur; `which` (K,) is the position among them of each run's"""
        self.order: Indices = np.argsort(self.which, kind="stable") if len(sources) > 1 else slice(None)
        """The runs, source after source"""
        self.ends = offsets_of(counts)
        """(sources + 1,) int64: source i has the runs order[ends[i]:ends[i + 1]]"""
        self.longest: list[int] = np.maximum.reduceat(self.sizes[self.order], self.ends[:-1]).tolist()
        """Rows of the longest run of each source"""

    def of(self, i: int) -> Indices:
        return self.order if isinstance(self.order, slice) else self.order[self.ends[i] : self.ends[i + 1]]

    def __len__(self) -> int:
        return len(self.sizes)


class Spans:
    """The elements of runs, of columns whose samples have equal lengths. `tables`: their offsets in each source."""

    def __init__(self, runs: Runs, tables: Sequence[np.ndarray | None]) -> None:
        self._runs = runs
        self.starts, self.stops = runs.starts, runs.stops
        """(K,) int64: the elements of each run in its source"""
        self.offsets: np.ndarray | None = None
        """(B + 1,) int64 of the gathered column; None: dense"""
        ragged = [table for table in tables if table is not None]
        if ragged:
            offsets = np.concatenate(ragged)
            first = offsets_of([len(table) for table in ragged])[runs.which] + runs.starts
            self.starts, self.stops = offsets[first], offsets[first + runs.sizes]
            rows_B = _expand(first, runs.sizes)
            self.offsets = offsets_of(offsets[rows_B + 1] - offsets[rows_B])
        self.sizes = self.stops - self.starts
        ends = np.cumsum(self.sizes)
        self.targets = ends - self.sizes
        """(K,) int64: the first element of each run in the gathered column"""
        self.count = int(ends[-1]) if len(ends) else 0

    @cached_property
    def indices(self) -> list[tuple[np.ndarray, Indices]]:
        """For each source: its elements, and those of the gathered column that they fill."""
        order = self._runs.order
        sizes = self.sizes[order]
        origin = _expand(self.starts[order], sizes)
        if isinstance(order, slice):
            return [(origin, order)]
        target = _expand(self.targets[order], sizes)
        ends = offsets_of(sizes)[self._runs.ends].tolist()
        return [(origin[start:stop], target[start:stop]) for start, stop in zip(ends[:-1], ends[1:], strict=True)]


@dataclass(eq=False)
class ColumnPlan:
    """How one column is gathered from its stretch in each source."""

    runs: Runs
    spans: Spans
    stretches: Sequence[Stretch]

    @property
    def width(self) -> int:
        return self.stretches[0].layout.element_bytes

    @property
    def nbytes(self) -> int:
        return self.spans.count * self.width

    def copy_into(self, target: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Fill the target, except for copies worth sharing among threads, which are returned."""
        if not self.nbytes:
            return []
        if self.nbytes >= LONG_RUN_BYTES * len(self.runs):
            return [(target[at:end], self.stretches[i].data[start:stop]) for i, start, stop, at, end in self._copies()]
        if self.spans.count >= MIN_RUN_ELEMENTS * len(self.runs):
            into, data = target.data, [stretch.data.data for stretch in self.stretches]
            for i, start, stop, at, end in self._copies():  # slices of a memoryview cost a third of an array's
                into[at:end] = data[i][start:stop]
            return []
        width = self.width
        element = f"u{width}" if width in (1, 2, 4, 8) else f"V{width}"
        elements = target.view(element)
        for stretch, (origin, destination) in zip(self.stretches, self.spans.indices, strict=True):
            elements[destination] = stretch.data.view(element)[origin]
        return []

    def checks(self, target: np.ndarray) -> list[BlockCheck]:
        """The blocks of which samples were copied to the target: there if the whole block was, else in the source."""
        if not self.nbytes:
            return []
        checks = []
        for i, (source, stretch) in enumerate(zip(self.runs.sources, self.stretches, strict=True)):
            if stretch.blocks is None or not len(stretch.blocks):
                continue
            assert stretch.sums is not None
            if len(stretch.blocks) == 1 and self.runs.longest[i] < stretch.blocks.rows[1]:  # short and in another order
                checks.append(BlockCheck(source, [stretch.data.data], stretch.sums))
            else:
                checks.append(self._check(i, source, stretch.blocks, target))
        return checks

    def _check(self, i: int, source: int, blocks: Blocks, target: np.ndarray) -> BlockCheck:
        """The blocks of source i of which samples were copied."""
        here, data, copied = self.runs.of(i), self.stretches[i].data.data, target.data
        numbers, views, bounds = list[int](), list[memoryview](), blocks.bytes
        shifts = (self.spans.targets[here] - self.spans.starts[here]) * self.width
        whole, cut = _copied_blocks(blocks.rows, self.runs.starts[here], self.runs.stops[here])
        for run, first, last in whole:
            edges = (bounds[first : last + 1] + shifts[run]).tolist()
            views += [copied[start:stop] for start, stop in zip(edges[:-1], edges[1:], strict=True)]
            numbers += range(first, last)
        views += [data[bounds[k] : bounds[k + 1]] for k in cut]
        sums = self.stretches[i].sums
        assert sums is not None
        return BlockCheck(source, views, sums[numbers + cut])

    def _copies(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(position of the source, first byte and end there, first byte and end in the target) of each run."""
        spans = self.spans
        starts = np.stack([spans.starts, spans.stops, spans.targets, spans.targets + spans.sizes]) * self.width
        return zip(self.runs.which.tolist(), *starts.tolist(), strict=True)


def _copied_blocks(
    rows: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Which blocks (bounded by `rows`) runs from `starts` to `stops` - 1 have: ([(run, first block, last block + 1) of
    those that a run has as a whole], [those of which rows were copied otherwise])."""
    first = np.searchsorted(rows, starts)  # the first block that the run has from its start …
    last = np.searchsorted(rows, stops, "right") - 1  # … and the first whose end it lacks
    whole = np.flatnonzero(first < last)
    cut = np.concatenate([(first - 1)[rows[first] > starts], last[rows[last] < stops]])
    return list(zip(whole.tolist(), first[whole].tolist(), last[whole].tolist(), strict=True)), np.unique(cut).tolist()


def _expand(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenate the ranges from starts[k] of sizes[k] numbers."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1] if len(ends) else 0)
