"""Gets that wait, and who is served when.

Waiting costs nothing: a waiter is an entry under what it wants, looked at when something changed that could serve it,
once for all who want the same. Whoever can be served is served, the longest waiting first.

Invariants (tests/distqueue/core/test_readers.py): a waiter is answered once, or leaves; of a batch that is dealt out
among readers every sample goes to exactly one, who gets it when it comes, or to whoever asks after its lease has run
out.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distqueue.balance import split_by_tokens
from distqueue.core.errors import QueueDrained
from distqueue.messages import Delivery
from distqueue.samples import SampleTable, Taken, Want


@dataclass(frozen=True)
class Share:
    """One of `readers` who get parts of the same batch, balanced by tokens."""

    rank: int
    readers: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.readers:
            raise ValueError(f"share=({self.rank}, {self.readers}): expected (rank, readers) with 0 <= rank < readers")


@dataclass(eq=False)
class Waiter:
    """A get that is not served yet. `answer` is called once, with a Delivery or an exception."""

    want: Want
    share: Share | None
    number: int
    since_s: float
    answer: Callable[[Delivery | Exception], None]

    @property
    def key(self) -> Key:
        return self.want, None if self.share is None else self.share.readers


Key = tuple[Want, int | None]
"""What waiters have in common: the want, and among how many readers a batch is dealt out"""


class Readers:
    """`deliver` says where samples lie; `all_has_come`: no new sample will be put any more."""

    def __init__(
        self,
        table: SampleTable,
        deliver: Callable[[Taken, Sequence[str]], Delivery],
        all_has_come: Callable[[], bool],
    ) -> None:
        self._table, self._deliver, self._all_has_come = table, deliver, all_has_come
        self.waiting: dict[Key, list[Waiter]] = {}
        self.shares: dict[Key, list[deque[tuple[float, Taken]]]] = {}
        """What was taken for readers who have not come for it yet, each until its lease runs out"""

    def join(self, waiter: Waiter) -> None:
        insort(self.waiting.setdefault(waiter.key, []), waiter, key=lambda other: other.number)

    def leave(self, waiter: Waiter) -> None:
        """Nobody waits there any more."""
        waiters = self.waiting.get(waiter.key)
        if waiters and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self.waiting[waiter.key]

    def everybody(self) -> list[Waiter]:
        return [waiter for waiters in self.waiting.values() for waiter in waiters]

    def serve(self, now_s: float) -> None:
        """Answers every waiter that can be answered."""
        for key in sorted(self.waiting, key=lambda key: self.waiting[key][0].number):
            serve = self._serve_first if key[1] is None else self._serve_shares
            while key in self.waiting and (serve(key, now_s) or self._drain_first(key)):
                pass

    def _serve_first(self, key: Key, now_s: float) -> bool:
        """Answers the longest waiting of those who want the same, if it can be answered."""
        want = key[0]
        if (taken := self._take(want, now_s)) is None:
            return False
        self._answer(self.waiting[key][0], self._deliver(taken, want.columns))
        return True

    def _serve_shares(self, key: Key, now_s: float) -> bool:
        """Answers one for whom there is a share; if there is for none, takes a batch and deals it out."""
        want, readers = key
        assert readers is not None
        shares = self.shares.get(key, [])
        for waiter in self.waiting[key] if shares else ():
            assert waiter.share is not None
            mine = _still_leased(shares[waiter.share.rank], now_s)
            if mine:
                part = mine.popleft()[1]
                live = np.flatnonzero(self._table.are_live(part.ids))  # some may have been dropped meanwhile
                self._answer(waiter, self._deliver(part.select(live), want.columns))
                return True
        if (taken := self._take(want, now_s)) is None:
            return False
        self._forget_shares(now_s)
        shares = self.shares.setdefault(key, [deque() for _ in range(readers)])
        units = taken.groups if want.whole_groups else ()
        for rank, rows in enumerate(split_by_tokens(taken.tokens.tolist(), readers, units)):
            shares[rank].append((now_s + self._table.lease_s, taken.select(rows)))
        return True

    def _forget_shares(self, now_s: float) -> None:
        """Lets go of what nobody came for in time: wants change, with `min_version` at every step."""
        for key, shares in list(self.shares.items()):
            if not any([_still_leased(waiting, now_s) for waiting in shares]):
                del self.shares[key]

    def _drain_first(self, key: Key) -> bool:
        """Tells one of those who want the same that nothing will come any more, if so."""
        want = key[0]
        if not self._is_last(want) or self._table.leased(want.task):
            return False
        left = f"; {left:,} samples that it may not have are left" if (left := self._table.open(want.task)) else ""
        drained = QueueDrained(f"the queue is sealed and task {want.task!r} has had everything{left}")
        self._answer(self.waiting[key][0], drained)
        return True

    def _take(self, want: Want, now_s: float) -> Taken | None:
        """Once nothing more comes, the rest, even if it is less."""
        if self._is_last(want):
            want = replace(want, partial=True)
        return self._table.take(want, now_s) if self._table.can_serve(want) else None

    def _is_last(self, want: Want) -> bool:
        """Whether all that `want` will ever find is there: no sample is to come, and no open one lacks a column."""
        return self._all_has_come() and self._table.is_settled(want)

    def _answer(self, waiter: Waiter, answer: Delivery | Exception) -> None:
        self.leave(waiter)
        waiter.answer(answer)


def _still_leased(shares: deque[tuple[float, Taken]], now_s: float) -> deque[tuple[float, Taken]]:
    """Without those whose leases have run out: others have them by now."""
    while shares and shares[0][0] <= now_s:
        shares.popleft()
    return shares
