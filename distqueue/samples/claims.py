"""The state of a row for each task (open, leased, acknowledged), and when its lease ends.

    open ──lease──► leased ──ack──► acked
      ▲─ expiry, release ─┘

Invariants: `acked` is final; `leased` and `acked` count the live rows in these states; no lease ends before
`next_expiry_s`, so the rows are searched for expired leases only once it has passed."""

import math

import numpy as np

from distqueue.samples.pages import Pages

OPEN, LEASED, ACKED = 0, 1, 2
MAX_HANDED = 255
"""Deliveries of one sample are counted up to this"""


class Claims:
    """Claims of tasks 0 to tasks - 1 on the rows in `pages`. All slots passed in are live and distinct."""

    def __init__(self, pages: Pages, tasks: int, lease_s: float) -> None:
        self.lease_s = lease_s
        self.state = [pages.field(np.int8) for _ in range(tasks)]
        self.handed = [pages.field(np.uint8) for _ in range(tasks)]
        """deliveries of the row to the task"""
        self._ends_s = [pages.field(np.float64) for _ in range(tasks)]
        """when the lease of a leased row ends"""
        self._earliest_s = math.inf
        self.redelivered = [0] * tasks
        self.leased = [0] * tasks
        """live rows that the task holds"""
        self.acked = [0] * tasks
        """live rows that the task has acknowledged"""

    def start(self, slots: np.ndarray) -> None:
        """Open new rows for every task."""
        for state, handed in zip(self.state, self.handed, strict=True):
            state.values[slots], handed.values[slots] = OPEN, 0

    def is_open(self, task: int, slots: np.ndarray) -> np.ndarray:
        return self.state[task].values[slots] == OPEN

    def is_leased(self, task: int, slots: np.ndarray) -> np.ndarray:
        return self.state[task].values[slots] == LEASED

    def is_acked(self, task: int, slots: np.ndarray) -> np.ndarray:
        return self.state[task].values[slots] == ACKED

    def all_acked(self, slots: np.ndarray) -> np.ndarray:
        return np.logical_and.reduce([state.values[slots] == ACKED for state in self.state])

    def lease(self, task: int, slots: np.ndarray, now_s: float) -> None:
        """Lease open rows to a reader of the task until now_s + lease_s."""
        assert self.is_open(task, slots).all(), "leased or acknowledged already"
        handed = self.handed[task].values[slots]
        self.redelivered[task] += int(np.count_nonzero(handed))
        self.handed[task].values[slots] = handed + (handed < MAX_HANDED)
        self._set(task, slots, LEASED)
        self.renew(task, slots, now_s)

    def renew(self, task: int, slots: np.ndarray, now_s: float) -> None:
        """Extend the leases of leased rows until now_s + lease_s."""
        assert self.is_leased(task, slots).all()
        if len(slots):
            self._ends_s[task].values[slots] = now_s + self.lease_s
            self._earliest_s = min(self._earliest_s, now_s + self.lease_s)

    def release(self, task: int, slots: np.ndarray) -> None:
        self._set(task, slots, OPEN)

    def ack(self, task: int, slots: np.ndarray) -> None:
        """Acknowledge rows, leased or not."""
        self._set(task, slots, ACKED)

    def end(self, slots: np.ndarray) -> None:
        for task in range(len(self.state)):
            self._set(task, slots, OPEN)

    def next_expiry_s(self) -> float | None:
        """A time before which no lease expires; None: nothing is leased."""
        return self._earliest_s if any(self.leased) else None

    def expire(self, now_s: float) -> list[tuple[int, np.ndarray]]:
        """Open rows whose lease has expired. Return (task, rows that are open again) per task."""
        opened: list[tuple[int, np.ndarray]] = []
        if now_s < self._earliest_s:
            return opened
        self._earliest_s = math.inf
        for task, state in enumerate(self.state):
            leased = np.flatnonzero(state.values == LEASED)
            ends_s = self._ends_s[task].values[leased]
            has_ended = ends_s <= now_s
            self._earliest_s = min(self._earliest_s, float(ends_s[~has_ended].min(initial=math.inf)))
            if has_ended.any():
                opened.append((task, leased[has_ended]))
                self.release(*opened[-1])
        return opened

    def _set(self, task: int, slots: np.ndarray, state: int) -> None:
        """Change the state of rows, and what is counted."""
        states = self.state[task].values[slots]
        for value, counts in ((LEASED, self.leased), (ACKED, self.acked)):
            counts[task] += (state == value) * len(slots) - int(np.count_nonzero(states == value))
        self.state[task].values[slots] = state
