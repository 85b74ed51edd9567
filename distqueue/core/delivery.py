"""Deliveries: which samples a reader receives, and the places and runs of rows where their columns lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distqueue.messages import Delivery, Part, Place, runs_of, spans_of
from distqueue.samples import SampleTable
from distqueue.segments import SegmentLedger


def deliver(
    table: SampleTable,
    ledger: SegmentLedger,
    *,
    ids: tuple[str, ...],
    groups: tuple[str, ...],
    versions: np.ndarray,
    rows: np.ndarray,
    columns: Sequence[str],
    lengths: Sequence[str] = (),
    too_old: tuple[str, ...] = (),
) -> Delivery:
    """Describe live samples that hold the columns.

    `rows` (B,) int64 are their row numbers, `groups` "" where a sample has none, `versions` (B, 2) -1 where unknown;
    `lengths` names columns of which only the tokens are delivered.
    """
    if not ids:
        return Delivery(too_old=too_old)
    parts = table.parts(rows, columns)
    numbers = np.unique(np.concatenate([segments for _, segments, _ in parts]))
    return Delivery(
        ids=ids,
        groups=groups if any(groups) else (),
        versions=() if (versions < 0).any() else spans_of(versions),
        places=tuple(
            Place(number, ledger.segments[number].shard, ledger.segments[number].path) for number in numbers.tolist()
        ),
        parts=tuple(
            Part(tuple(names), runs_of(np.searchsorted(numbers, segments), positions))
            for names, segments, positions in parts
        ),
        too_old=too_old,
        lengths=dict(zip(lengths, table.row_lengths(rows, lengths), strict=True)),
    )
