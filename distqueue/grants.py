"""The files that a client was granted for its next puts, so that a put takes one call.

A client's puts alternate between a few sizes: finished samples, a column added to them. So it keeps a few files.

Invariants (tests/distqueue/test_grants.py): a file is taken once, before half of its lease is over, for a put that it
fits; of those that fit, the smallest; at most MAX_GRANTS are kept, and each of the others is cancelled once."""

import threading
from collections.abc import Callable

from distqueue.messages import File

MAX_GRANTS = 4


class Grants:
    """Thread-safe. `cancel` gives a file back; times are those of this process's clock."""

    def __init__(self, cancel: Callable[[File], None]) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._kept: dict[File, float] = {}
        """Time until which each may be taken, oldest first"""

    def keep(self, file: File, now_s: float) -> None:
        with self._lock:
            self._kept[file] = now_s + file.lease_s / 2
            excess = [*self._kept][:-MAX_GRANTS]
            for one in excess:
                del self._kept[one]
        for one in excess:
            self._cancel(one)

    def clear(self) -> None:
        """Cancel all: one of them was revoked, so the queue needs the room."""
        with self._lock:
            cleared, self._kept = self._kept, {}
        for file in cleared:
            self._cancel(file)

    def take(self, nbytes: int, now_s: float) -> File | None:
        """Take the smallest file that fits a put of `nbytes`; None: there is none."""
        with self._lock:
            expired = [file for file, until_s in self._kept.items() if until_s <= now_s]
            fitting = [file for file, until_s in self._kept.items() if until_s > now_s and file.fits(nbytes)]
            taken = min(fitting, key=lambda file: file.size, default=None)
            self._kept = {file: until_s for file, until_s in self._kept.items() if file not in (*expired, taken)}
        for file in expired:
            self._cancel(file)
        return taken
