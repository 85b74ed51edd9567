"""Looks into a sample table from outside: which live rows lie in which segments, and where a column lies."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from distqueue.samples import SampleTable


def live_rows_by_segment(table: SampleTable) -> dict[int, int]:
    """Count live rows per segment."""
    segments = table.state.segments
    slots = segments.pages.live_slots()
    counts = segments.live.values[slots].tolist()
    return dict(zip(segments.pages.numbers(slots).tolist(), counts, strict=True))


def places(table: SampleTable, rows: np.ndarray | Sequence[str], column: str) -> list[tuple[int, int]]:
    """(segment, position) of a column of rows, given by number or id."""
    numbers = rows if isinstance(rows, np.ndarray) else table.find(rows).rows
    ((names, segments, positions),) = table.parts(numbers, [column])
    assert names == [column]
    return list(zip(segments.tolist(), positions.tolist(), strict=True))


def nbytes(table: SampleTable) -> int:
    """Bytes of all arrays, untouched parts included."""
    state = table.state
    endings = state.endings
    pages = (state.pages, state.segments.pages)
    return (
        sum(field.values.nbytes for kept in pages for field in (*kept._fields, *kept._page_fields))
        + sum(kept._physical.nbytes for kept in pages)
        + sum(array.nbytes for array in (endings._marks, endings._how, endings._order))
        + sum(sys.getsizeof(kept) for names in (state.ids, state.groups) for kept in vars(names).values())
    )
