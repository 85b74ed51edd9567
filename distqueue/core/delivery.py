"""Deliveries: which samples a reader receives, and the places and runs of rows where their columns lie."""

from collections.abc import Sequence

import numpy as np

from distqueue.messages import Delivery, DeliveryPart, SegmentPlace, runs_of, spans_of
from distqueue.samples import SampleTable, Taken
from distqueue.segments import SegmentLedger


def deliver(
    table: SampleTable, ledger: SegmentLedger, taken: Taken, *, columns: Sequence[str], lengths: Sequence[str]
) -> Delivery:
    """Describe live samples that hold the columns. `lengths`: columns of which only the tokens are delivered."""
    if not len(taken):
        return Delivery()
    parts = table.parts(taken.rows, columns)
    numbers = np.unique(np.concatenate([segments for _, segments, _ in parts]))
    return Delivery(
        ids=taken.ids,
        groups=taken.groups if any(taken.groups) else (),
        versions=() if (taken.versions < 0).any() else spans_of(taken.versions),
        places=tuple(
            SegmentPlace(number, ledger.segments[number].shard, ledger.segments[number].path)
            for number in numbers.tolist()
        ),
        parts=tuple(
            DeliveryPart(tuple(names), runs_of(np.searchsorted(numbers, segments), positions))
            for names, segments, positions in parts
        ),
        lengths=dict(zip(lengths, table.row_lengths(taken.rows, lengths), strict=True)),
    )
