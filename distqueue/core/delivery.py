"""Where samples lie, as a reader is told: places, and per set of columns that lie alike the runs of rows in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distqueue.messages import Delivery, Part, Place, runs_of
from distqueue.samples import SampleTable
from distqueue.segments import SegmentLedger


def deliver(
    table: SampleTable, ledger: SegmentLedger, ids: tuple[str, ...], rows: np.ndarray, columns: Sequence[str]
) -> Delivery:
    """`rows` are the numbers of the live samples `ids`."""
    if not ids:
        return Delivery((), (), (), (), ())
    groups, versions = table.describe(rows)
    parts: list[tuple[list[str], np.ndarray, np.ndarray]] = []
    for name in columns:
        segments, inside = table.places(rows, name)
        for names, known, at in parts:
            if np.array_equal(known, segments) and np.array_equal(at, inside):
                names.append(name)
                break
        else:
            parts.append(([name], segments, inside))
    numbers = np.unique(np.concatenate([segments for _, segments, _ in parts]))
    return Delivery(
        ids=ids,
        groups=groups if any(groups) else (),
        versions=() if (versions < 0).any() else tuple(map(tuple, versions.tolist())),
        places=tuple(
            Place(number, ledger.segments[number].shard, ledger.segments[number].path) for number in numbers.tolist()
        ),
        parts=tuple(
            Part(tuple(names), runs_of(np.searchsorted(numbers, segments), inside)) for names, segments, inside in parts
        ),
    )
