"""Gathers samples from many segments into one batch: every byte is copied once, directly into the reader's buffer.
A client views the gathered bytes as tensors (`columns.py`); a shard sends them to a reader of another node (`wire.py`).

Long runs of neighbouring samples are copied run by run. If samples are short and in another order, runs of one sample
would cost more in Python than in bytes; then elements are gathered by index, which columns of equal lengths share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from distqueue.messages import Part
from distqueue.payload.buffers import BufferPool
from distqueue.payload.copying import copy_all
from distqueue.payload.segment_file import ALIGN, Stretch

MIN_RUN_ELEMENTS = 16
"""Mean length of the runs from which they are copied run by run"""

LONG_RUN_BYTES = 1 << 14
"""Mean bytes of the runs from which their copies are shared among threads"""


def gather(parts: Sequence[Part], sources: Sequence[Mapping[str, Stretch]], buffers: BufferPool) -> dict[str, Stretch]:
    """Gather all columns of all parts into one buffer; the runs of a part index `sources`."""
    plans = {}
    for part in parts:
        indices: dict[tuple[int, ...], Indices] = {}
        for name in part.columns:
            plans[name] = ColumnPlan.make([columns.get(name) for columns in sources], part, indices)
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
        gathered[name] = Stretch(plan.first.layout, target, plan.offsets)
    copy_all(long)
    return gathered


@dataclass(eq=False)
class Indices:
    """Elements to fetch and their destinations, by segment; made at first use, shared by columns of equal lengths."""

    by_segment: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)


@dataclass(eq=False)
class ColumnPlan:
    """How one column is gathered."""

    sources: Sequence[Stretch | None]
    runs: np.ndarray
    """(K, 3) int64: (segment, first sample, last sample + 1)"""
    offsets: np.ndarray | None
    """(B + 1,) int64 of the gathered column; None: dense"""
    elements: int
    first: Stretch
    indices: Indices

    @classmethod
    def make(cls, sources: Sequence[Stretch | None], part: Part, shared: dict[tuple[int, ...], Indices]) -> ColumnPlan:
        used = np.unique(part.runs[:, 0]).tolist()
        stretches = {segment: sources[segment] for segment in used}
        assert all(stretch is not None for stretch in stretches.values()), "a segment lacks a column"
        first = stretches[used[0]]
        assert first is not None
        key = tuple(id(stretch.offsets) for stretch in stretches.values() if stretch is not None)
        indices = shared.setdefault(key, Indices())
        if first.offsets is None:
            elements = part.num_samples
            offsets: np.ndarray | None = None
        else:
            lengths = _lengths(sources, part.runs)
            elements = int(lengths.sum())
            offsets = np.concatenate([[0], np.cumsum(lengths)])
        return cls(sources, runs=part.runs, offsets=offsets, elements=elements, first=first, indices=indices)

    @property
    def nbytes(self) -> int:
        return self.elements * self.first.layout.element_bytes

    def copy_into(self, target: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Fill the target, except for copies worth sharing among threads, which are returned."""
        if not self.nbytes:
            return []
        if self.nbytes >= LONG_RUN_BYTES * len(self.runs):
            return self._long_runs(target)
        if self.elements >= MIN_RUN_ELEMENTS * len(self.runs):
            self._copy_runs(target)
        else:
            self._copy_elements(target)
        return []

    def _long_runs(self, target: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        pairs, at = [], 0
        for segment, start, stop in self._byte_runs():
            source = self.sources[segment]
            assert source is not None
            pairs.append((target[at : at + stop - start], source.data[start:stop]))
            at += stop - start
        return pairs

    def _copy_runs(self, target: np.ndarray) -> None:
        into, at = target.data, 0  # slices of a memoryview cost a third of an array's
        data = [None if source is None else source.data.data for source in self.sources]
        for segment, start, stop in self._byte_runs():
            size = stop - start
            into[at : at + size] = data[segment][start:stop]  # type: ignore[index]
            at += size

    def _byte_runs(self) -> list[list[int]]:
        """(segment, first byte, last byte + 1) of each run."""
        segments, bounds = self.runs[:, 0], self.runs[:, 1:].copy()
        for segment in np.unique(segments).tolist():
            source = self.sources[segment]
            assert source is not None
            if source.offsets is not None:
                here = segments == segment
                bounds[here] = source.offsets[bounds[here]]
        return np.column_stack([segments, bounds * self.first.layout.element_bytes]).tolist()

    def _copy_elements(self, target: np.ndarray) -> None:
        width = self.first.layout.element_bytes
        element = f"u{width}" if width in (1, 2, 4, 8) else f"V{width}"
        into = target.view(element)
        if not self.indices.by_segment:
            self.indices.by_segment = self._index_elements()
        for segment, origin, destination in self.indices.by_segment:
            source = self.sources[segment]
            assert source is not None
            into[destination] = source.data.view(element)[origin]

    def _index_elements(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """For each segment (its number, elements to fetch, elements to fill)."""
        sizes = self.runs[:, 2] - self.runs[:, 1]
        segment_B = np.repeat(self.runs[:, 0], sizes)
        row_B = np.repeat(self.runs[:, 1] - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        found = []
        for segment in np.unique(segment_B).tolist():
            rows = np.flatnonzero(segment_B == segment)
            source = self.sources[segment]
            assert source is not None
            if source.offsets is None or self.offsets is None:
                found.append((segment, row_B[rows], rows))
                continue
            lengths = np.diff(self.offsets)[rows]
            inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            origin = np.repeat(source.offsets[row_B[rows]], lengths) + inside
            found.append((segment, origin, np.repeat(self.offsets[rows], lengths) + inside))
        return found


def _lengths(sources: Sequence[Stretch | None], runs: np.ndarray) -> np.ndarray:
    """(B,) int64: elements of each sample, run after run."""
    pieces = []
    for segment, start, stop in runs.tolist():
        offsets = sources[segment].offsets  # type: ignore[union-attr]
        pieces.append(offsets[start + 1 : stop + 1] - offsets[start:stop])  # type: ignore[index]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
