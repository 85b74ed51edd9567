"""From where samples lie to one batch: every byte copied once, straight into memory of the reader's own.

Long runs of neighbours are copied run by run. Where samples are short and lie in another order, a run a sample would
cost more in Python than in bytes; then elements are gathered by index, the index shared by columns of equal lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from distqueue.column import Column
from distqueue.messages import Part
from distqueue.payload.buffers import WarmBuffers
from distqueue.payload.copying import copy_all
from distqueue.payload.segment_file import ALIGN, Stretch

BY_RUN = 16
"""Mean elements of a run from which on it is copied by itself"""

LONG_RUN = 1 << 14
"""Mean bytes of a run from which on the copy outweighs all else"""


def gather_columns(
    parts: Sequence[Part], sources: Sequence[Mapping[str, Stretch]], buffers: WarmBuffers
) -> dict[str, Column]:
    """All columns of all parts in one buffer; the runs of a part are of `sources`."""
    plans = {}
    for part in parts:
        indices: dict[tuple[int, ...], Indices] = {}
        for name in part.columns:
            plans[name] = ColumnPlan.make([columns.get(name) for columns in sources], part, indices)
    starts, size = {}, 0
    for name, plan in plans.items():
        starts[name] = size
        size += plan.nbytes + -plan.nbytes % ALIGN
    whole = buffers.take(size)
    memory = whole.numpy()
    columns = {}
    long: list[tuple[np.ndarray, np.ndarray]] = []
    for name, plan in plans.items():
        target = slice(starts[name], starts[name] + plan.nbytes)
        long += plan.copy_into(memory[target])
        columns[name] = plan.column(whole[target])
    copy_all(long)
    return columns


@dataclass(eq=False)
class Indices:
    """Elements to fetch and where they go, by segment; made at first use and shared by columns of equal lengths."""

    by_segment: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)


@dataclass(eq=False)
class ColumnPlan:
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
            elements = int((part.runs[:, 2] - part.runs[:, 1]).sum())
            return cls(sources, part.runs, None, elements, first, indices)
        offsets = np.concatenate([[0], np.cumsum(_lengths(sources, part.runs))])
        return cls(sources, part.runs, offsets, int(offsets[-1]), first, indices)

    @property
    def nbytes(self) -> int:
        return self.elements * self.first.element_bytes

    def copy_into(self, target: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Fills the target, but for copies that are worth sharing among threads: those are returned."""
        if not self.nbytes:
            return []
        if self.nbytes >= LONG_RUN * len(self.runs):
            return self._long_runs(target)
        if self.elements >= BY_RUN * len(self.runs):
            self._copy_runs(target)
        else:
            self._copy_elements(target)
        return []

    def column(self, memory: torch.Tensor) -> Column:
        layout = self.first.layout
        shape = (self.elements, *layout.trailing)
        buffer = memory.view(layout.dtype).reshape(shape) if self.nbytes else torch.empty(shape, dtype=layout.dtype)
        return Column(buffer, None if self.offsets is None else torch.from_numpy(self.offsets), layout.kind)

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
        """(segment, first byte, last byte + 1) a run."""
        segments, bounds = self.runs[:, 0], self.runs[:, 1:].copy()
        for segment in np.unique(segments).tolist():
            source = self.sources[segment]
            assert source is not None
            if source.offsets is not None:
                here = segments == segment
                bounds[here] = source.offsets[bounds[here]]
        return np.column_stack([segments, bounds * self.first.element_bytes]).tolist()

    def _copy_elements(self, target: np.ndarray) -> None:
        width = self.first.element_bytes
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
