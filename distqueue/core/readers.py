"""Waiting gets, and the order in which they are served.

Waiting costs nothing: waiters are grouped by their selection, and a group is checked once when a change could serve it.
Every waiter that can be served is served, the longest waiting first.

Invariants (tests/distqueue/core/test_readers.py): a waiter is answered once, or leaves; of a batch that is dealt out
to several readers every sample goes to exactly one of them, who receives it when it asks, or, after the lease has
expired, to any reader.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from distqueue.balance import split_by_tokens
from distqueue.errors import QueueDrained
from distqueue.messages import Delivery
from distqueue.samples import SampleTable, Selection, Taken


@dataclass(frozen=True)
class Share:
    """The part of one of `readers` readers in the same batch, which is balanced by tokens."""

    rank: int
    readers: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.readers:
            raise ValueError(f"share=({self.rank}, {self.readers}): expected (rank, readers) with 0 <= rank < readers")


@dataclass(eq=False)
class Waiter:
    """A get that is not served yet. `answer` is called once, with a Delivery or an exception."""

    selection: Selection
    _: KW_ONLY
    share: Share | None
    number: int
    since_s: float
    answer: Callable[[Delivery | Exception], None]

    @property
    def key(self) -> Key:
        return self.selection, None if self.share is None else self.share.readers


Key = tuple[Selection, int | None]
"""Equal for waiters that can be served by the same batch: the selection, and how many readers share a batch"""


class Readers:
    """`deliver` locates the payload of leased samples; `is_complete`: whether no new sample can be put any more."""

    def __init__(
        self,
        table: SampleTable,
        *,
        deliver: Callable[[Taken, Selection], Delivery],
        is_complete: Callable[[], bool],
    ) -> None:
        self._table, self._deliver, self._is_complete = table, deliver, is_complete
        self.waiting: dict[Key, list[Waiter]] = {}
        self.shares: dict[Key, list[deque[tuple[float, Taken]]]] = {}
        """Per rank, samples leased for readers that have not asked for them yet, each with the end of its lease"""

    def join(self, waiter: Waiter) -> None:
        insort(self.waiting.setdefault(waiter.key, []), waiter, key=lambda other: other.number)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter, answered or not."""
        waiters = self.waiting.get(waiter.key)
        if waiters and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self.waiting[waiter.key]

    def all_waiting(self) -> list[Waiter]:
        return [waiter for waiters in self.waiting.values() for waiter in waiters]

    def serve(self, now_s: float) -> None:
        """Answer every waiter that can be answered."""
        for key in sorted(self.waiting, key=lambda key: self.waiting[key][0].number):
            serve = self._serve_first if key[1] is None else self._serve_shares
            try:
                while key in self.waiting and (serve(key, now_s) or self._drain_first(key)):
                    pass
            except Exception as error:  # whatever is wrong with a selection is its readers', and delays no other
                for waiter in list(self.waiting.get(key, ())):
                    self._answer(waiter, error)

    def _serve_first(self, key: Key, now_s: float) -> bool:
        """Answer the longest waiting reader of a selection. Returns whether it could be answered."""
        selection = key[0]
        if (taken := self._take(selection, now_s)) is None:
            return False
        self._answer(self.waiting[key][0], self._deliver(taken, selection))
        return True

    def _serve_shares(self, key: Key, now_s: float) -> bool:
        """Answer one waiter whose share exists; if no share exists, take a batch and deal it out."""
        selection, readers = key
        assert readers is not None
        shares = self.shares.get(key, [])
        for waiter in self.waiting[key] if shares else ():
            assert waiter.share is not None
            own = _still_leased(shares[waiter.share.rank], now_s)
            if own:
                part = own.popleft()[1]
                live = np.flatnonzero(self._table.are_live(part.ids))  # some may have been dropped meanwhile
                self._answer(waiter, self._deliver(part.select(live), selection))
                return True
        if (taken := self._take(selection, now_s)) is None:
            return False
        self._forget_shares(now_s)
        shares = self.shares.setdefault(key, [deque() for _ in range(readers)])
        units = taken.groups if selection.whole_groups else ()
        for rank, rows in enumerate(split_by_tokens(taken.tokens.tolist(), readers, units)):
            shares[rank].append((now_s + self._table.lease_s, taken.select(rows)))
        return True

    def _forget_shares(self, now_s: float) -> None:
        """Discard shares that were not fetched in time: selections change, with `min_version` at every step."""
        for key, shares in list(self.shares.items()):
            if not any([_still_leased(waiting, now_s) for waiting in shares]):
                del self.shares[key]

    def _drain_first(self, key: Key) -> bool:
        """Answer one waiter of a selection with QueueDrained if nothing more will come. Returns whether it did."""
        selection = key[0]
        if not self._is_last(selection) or self._table.leased(selection.task):
            return False
        left = (
            f"; {left:,} samples remain that its selection excludes"
            if (left := self._table.open(selection.task))
            else ""
        )
        drained = QueueDrained(f"the queue is sealed and task {selection.task!r} has received everything{left}")
        self._answer(self.waiting[key][0], drained)
        return True

    def _take(self, selection: Selection, now_s: float) -> Taken | None:
        """Lease a batch for the selection; once nothing more comes, the rest, even if it is smaller."""
        if self._is_last(selection):
            selection = replace(selection, partial=True)
        return self._table.take(selection, now_s) if self._table.can_serve(selection) else None

    def _is_last(self, selection: Selection) -> bool:
        """Whether no further sample can become ready: none can be put, and no open one lacks a column."""
        return self._is_complete() and self._table.is_settled(selection)

    def _answer(self, waiter: Waiter, answer: Delivery | Exception) -> None:
        self.leave(waiter)
        waiter.answer(answer)


def _still_leased(shares: deque[tuple[float, Taken]], now_s: float) -> deque[tuple[float, Taken]]:
    """Remove shares whose leases have expired: their samples may have been handed to others."""
    while shares and shares[0][0] <= now_s:
        shares.popleft()
    return shares
