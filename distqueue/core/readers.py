"""Waiting gets, the order in which they are served, and what a reader receives.

Waiting costs nothing: waiters are grouped by their selection, and a group is checked once when a change could serve it.
Every waiter that can be served is served, the longest waiting first.

Invariant (tests/distqueue/core/test_readers.py): a waiter is answered once, or leaves."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from distqueue.errors import QueueDrained
from distqueue.messages import Delivery, DeliveryPart, SegmentPlace, runs_of, spans_of
from distqueue.samples import SampleTable, Selection, Taken
from distqueue.segments import SegmentLedger


@dataclass(eq=False)
class Waiter:
    """A get that is not served yet. `answer` is called once, with a Delivery or an exception."""

    selection: Selection
    _: KW_ONLY
    number: int
    since_s: float
    answer: Callable[[Delivery | Exception], None]


class Readers:
    """`is_complete`: whether no new sample can be put any more."""

    def __init__(self, table: SampleTable, ledger: SegmentLedger, is_complete: Callable[[], bool]) -> None:
        self._table, self._ledger, self._is_complete = table, ledger, is_complete
        self.waiting: dict[Selection, list[Waiter]] = {}

    def join(self, waiter: Waiter) -> None:
        insort(self.waiting.setdefault(waiter.selection, []), waiter, key=lambda other: other.number)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter, answered or not."""
        waiters = self.waiting.get(waiter.selection)
        if waiters and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self.waiting[waiter.selection]

    def all_waiting(self) -> list[Waiter]:
        return [waiter for waiters in self.waiting.values() for waiter in waiters]

    def serve(self, now_s: float) -> None:
        for selection in sorted(self.waiting, key=lambda selection: self.waiting[selection][0].number):
            try:
                while selection in self.waiting and (answer := self._next_answer(selection, now_s)) is not None:
                    self._answer(self.waiting[selection][0], answer)
            except Exception as error:  # whatever is wrong with a selection is its readers', and delays no other
                for waiter in list(self.waiting.get(selection, ())):
                    self._answer(waiter, error)

    def _next_answer(self, selection: Selection, now_s: float) -> Delivery | QueueDrained | None:
        """Return what the longest waiting reader of a selection is answered; None: it waits on. Once nothing more
        comes, the rest is a batch, even if it is smaller."""
        is_last = self._is_complete() and self._table.is_settled(selection)
        taken = self._table.take(replace(selection, partial=True) if is_last else selection, now_s)
        if taken is not None:
            names = {"columns": selection.columns, "lengths": selection.lengths}
            return deliver(self._table, self._ledger, taken, **names)
        if not is_last or self._table.leased(selection.task):
            return None
        return QueueDrained(f"the queue is sealed and task {selection.task!r} has received everything")

    def _answer(self, waiter: Waiter, answer: Delivery | Exception) -> None:
        self.leave(waiter)
        waiter.answer(answer)


def deliver(
    table: SampleTable, ledger: SegmentLedger, taken: Taken, *, columns: Sequence[str], lengths: Sequence[str]
) -> Delivery:
    """Describe live samples that hold the columns, and the places and runs of rows where these lie. `lengths`: columns
    of which only the tokens are delivered."""
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
