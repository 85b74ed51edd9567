"""The state of a row for each task (open, leased, acknowledged), and the leases with their deadlines.

    open (0) ──lease──► leased (number of its lease) ──ack──► acked (-1)
       ▲────── expiry, release ──────┘

Invariants: `acked` is final; a lease is stored exactly while a row is held under it, so that memory follows the number
of leased rows rather than the length of leases; a row is held under one lease per task at a time, whose number shows at
expiry whether the row is still held under it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from distqueue.samples.pages import Pages

OPEN, ACKED = 0, -1
LAST_LEASE = (1 << 31) - 1
MAX_HANDED = 255
"""Deliveries of one sample are counted up to this"""


@dataclass
class Lease:
    """Rows leased to a reader at one time."""

    deadline_s: float
    task: int
    slots: np.ndarray
    """also of rows that were acknowledged or released since"""
    num_held: int
    """rows still held under this lease"""


class Claims:
    """Claims of tasks 0 to tasks - 1 on the rows in `pages`. All slots passed in are live and distinct."""

    def __init__(self, pages: Pages, tasks: int, lease_s: float) -> None:
        self.lease_s = lease_s
        self.state = [pages.field(np.int32) for _ in range(tasks)]
        self.handed = [pages.field(np.uint8) for _ in range(tasks)]
        """deliveries of the row to the task"""
        self.redelivered = [0] * tasks
        self.acked = [0] * tasks
        """live rows that the task has acknowledged"""
        self._leases: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        """heap of (deadline, lease); still contains leases that hold no row any more"""
        self._last = 0

    def start(self, slots: np.ndarray) -> None:
        """Open new rows for every task."""
        for state, handed in zip(self.state, self.handed, strict=True):
            state.values[slots], handed.values[slots] = OPEN, 0

    def is_open(self, task: int, slots: np.ndarray) -> np.ndarray:
        return self.state[task].values[slots] == OPEN

    def is_leased(self, task: int, slots: np.ndarray) -> np.ndarray:
        return self.state[task].values[slots] > OPEN

    def is_acked(self, task: int, slots: np.ndarray) -> np.ndarray:
        return self.state[task].values[slots] == ACKED

    def all_acked(self, slots: np.ndarray) -> np.ndarray:
        return np.logical_and.reduce([state.values[slots] == ACKED for state in self.state])

    def num_leased(self, task: int) -> int:
        """Count the rows that the task holds."""
        return sum(lease.num_held for lease in self._leases.values() if lease.task == task)

    def lease(self, task: int, slots: np.ndarray, now_s: float) -> None:
        """Lease open rows to a reader of the task until now_s + lease_s."""
        assert self.is_open(task, slots).all(), "leased or acknowledged already"
        handed = self.handed[task].values[slots]
        self.redelivered[task] += int(np.count_nonzero(handed))
        self.handed[task].values[slots] = handed + (handed < MAX_HANDED)
        self._open_lease(task, slots, now_s)

    def renew(self, task: int, slots: np.ndarray, now_s: float) -> None:
        """Extend the leases of leased rows until now_s + lease_s."""
        assert self.is_leased(task, slots).all()
        self._settle(task, slots)
        self._open_lease(task, slots, now_s)

    def release(self, task: int, slots: np.ndarray) -> None:
        """Open leased rows."""
        self._settle(task, slots)
        self.state[task].values[slots] = OPEN

    def ack(self, task: int, slots: np.ndarray) -> None:
        """Acknowledge rows that are not acknowledged yet, leased or not."""
        self._settle(task, slots)
        self.state[task].values[slots] = ACKED
        self.acked[task] += len(slots)

    def end(self, slots: np.ndarray) -> None:
        """Remove rows that have ended."""
        for task in range(len(self.state)):
            self._settle(task, slots)
            self.acked[task] -= int(np.count_nonzero(self.is_acked(task, slots)))
            self.state[task].values[slots] = OPEN  # or an expiring lease would still count them as held

    def next_expiry_s(self) -> float | None:
        """When the next lease expires; None: nothing is leased."""
        while self._deadlines and not self._is_current(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now_s: float) -> list[tuple[int, np.ndarray]]:
        """Open rows whose lease has expired. Returns (task, rows that are open again) per lease."""
        opened = []
        while (deadline_s := self.next_expiry_s()) is not None and deadline_s <= now_s:
            number = self._deadlines[0][1]
            lease = self._leases[number]
            slots = lease.slots[self.state[lease.task].values[lease.slots] == number]
            self.release(lease.task, slots)
            assert number not in self._leases, "a lease expired and still holds a row"
            opened.append((lease.task, slots))
        return opened

    def _is_current(self, deadline_s: float, number: int) -> bool:
        """Whether an entry of the heap belongs to a lease that holds rows."""
        return number in self._leases and self._leases[number].deadline_s == deadline_s

    def _open_lease(self, task: int, slots: np.ndarray, now_s: float) -> None:
        if not len(slots):
            return
        self._last = self._last % LAST_LEASE + 1
        while self._last in self._leases:
            self._last = self._last % LAST_LEASE + 1
        deadline_s = now_s + self.lease_s
        self.state[task].values[slots] = self._last
        self._leases[self._last] = Lease(deadline_s, task=task, slots=slots.astype(np.int32), num_held=len(slots))
        heapq.heappush(self._deadlines, (deadline_s, self._last))
        if len(self._deadlines) > 2 * len(self._leases) + 64:
            self._deadlines = [entry for entry in self._deadlines if self._is_current(*entry)]
            heapq.heapify(self._deadlines)

    def _settle(self, task: int, slots: np.ndarray) -> None:
        """Take rows out of the leases that hold them."""
        states = self.state[task].values[slots]
        held = states[states > OPEN]
        if not len(held):
            return
        numbers, counts = np.unique(held, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._leases[number].num_held -= count
            if not self._leases[number].num_held:
                del self._leases[number]
