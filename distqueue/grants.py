"""The files that a client was granted for its next puts, so that a put takes one call.

A client's puts alternate between a few sizes: finished samples, a column added to them. So it keeps a few files.

Invariants (tests/distqueue/test_grants.py): a file is taken once, before half of its lease is over, for a put that it
fits; of those that fit, the smallest; at most MAX_GRANTS are kept, and each of the others is cancelled once.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from distqueue.messages import File

MAX_GRANTS = 4


@dataclass(frozen=True)
class Grant:
    file: File
    until_s: float


class Grants:
    """Thread-safe. `cancel` gives a file back; times are those of this process's clock."""

    def __init__(self, cancel: Callable[[File], None]) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._kept: list[Grant] = []
        """Oldest first"""

    def keep(self, file: File, now_s: float) -> None:
        """Keep a file for a later put."""
        with self._lock:
            self._kept.append(Grant(file, now_s + file.lease_s / 2))
            excess, self._kept = self._kept[:-MAX_GRANTS], self._kept[-MAX_GRANTS:]
        for grant in excess:
            self._cancel(grant.file)

    def clear(self) -> None:
        """Cancel all: one of them was revoked, so the queue needs the room."""
        with self._lock:
            cleared, self._kept = self._kept, []
        for grant in cleared:
            self._cancel(grant.file)

    def take(self, nbytes: int, now_s: float) -> File | None:
        """Take the smallest file that fits a put of `nbytes`; None: there is none."""
        with self._lock:
            expired = [grant for grant in self._kept if grant.until_s <= now_s]
            self._kept = [grant for grant in self._kept if grant.until_s > now_s]
            fitting = [grant for grant in self._kept if grant.file.fits(nbytes)]
            taken = min(fitting, key=lambda grant: grant.file.size, default=None)
            if taken is not None:
                self._kept.remove(taken)
        for grant in expired:
            self._cancel(grant.file)
        return None if taken is None else taken.file
