"""A checkpoint is written while the run goes on: by a thread of the controller's, and one of every card that trains.

    controller   … ─ cut ─► next step ─► next step ─► … ─ cut: waits until the last one is written ─► …
    cards             └ snapshot: a copy of the state in host memory
                             └─► save: the copy, synced ──┐
    thread                                                └─► controller.json ─► older checkpoints go

Invariants:
1. One checkpoint is written at a time, and a cut begins when the last one counts.
2. A checkpoint counts (`savepoint.NAME` is there) only once all else of it is on disk; only then older ones go.
3. What goes wrong is raised where the run next looks at its cards, begins another save, or ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stalesync.failures import RunFailed


class SaveFailed(RunFailed):
    """The controller's part of a checkpoint could not be written."""


class Saver:
    """The thread that writes, when there is something to write."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._figures: dict[str, float] = {}
        self._written_s = 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The block is a cut: the run stands still. It begins when the last checkpoint is written.

        Raises:
            RunFailed: that could not be written.
        """
        start = time.perf_counter()
        self.finish()
        cut = time.perf_counter()
        try:
            yield
        except OSError as error:
            raise SaveFailed(_say(error)) from error
        self._figures |= {"timing_s/save": time.perf_counter() - start, "timing_s/save/wait": cut - start}

    def begin(self, write: Callable[[], None]) -> None:
        """Has ``write`` done beside what the caller goes on with."""
        assert self._thread is None, "one checkpoint is written at a time"
        self._thread = threading.Thread(target=self._run, args=(write,), name="save", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises:
        RunFailed: what was to be written could not be.
        """
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Waits until nothing is being written.

        Raises:
            RunFailed: as `check`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._figures["save/write_s"] = self._written_s
        self.check()

    def metrics(self) -> dict[str, float]:
        """Of the cut since the last call: seconds of the pause, of it those in which it waited for the checkpoint
        before to be written, and seconds that writing that one took."""
        figures, self._figures = self._figures, {}
        return figures

    def _run(self, write: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            write()
        except RunFailed as error:
            self._error = error
        except Exception as error:
            self._error = SaveFailed(_say(error))
        self._written_s = time.perf_counter() - start


def _say(error: Exception) -> str:
    return f"the controller failed in stage 'save': {type(error).__name__}: {error}"
