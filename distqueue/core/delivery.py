"""Where samples lie, as a reader is told: places, and per set of columns that lie alike the runs of rows in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distqueue.messages import Delivery, Part, Place, runs_of
from distqueue.samples import SampleTable
from distqueue.segments import SegmentLedger


def deliver(
    table: SampleTable,
    ledger: SegmentLedger,
    ids: tuple[str, ...],
    groups: tuple[str, ...],
    versions: np.ndarray,
    rows: np.ndarray,
    columns: Sequence[str],
    too_old: tuple[str, ...] = (),
) -> Delivery:
    """Of live samples that hold the columns: `rows` are their numbers, `groups` ("" for none) and `versions` (B, 2; -1:
    not known) what is known of them."""
    if not ids:
        return Delivery((), (), (), (), (), too_old)
    parts = table.parts(rows, columns)
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
        too_old=too_old,
    )
