"""Write a checkpoint while the run continues: in a thread of the controller, and one of every card that trains.

    controller   … ─ cut ─► next step ─► next step ─► … ─ cut: waits until the previous one is written ─► …
    cards             └ snapshot: a copy of the state in host memory
                             └─► save: the copy, synced ──┐
    thread                                                └─► manifest.json ─► older checkpoints are removed

Invariants:
1. One checkpoint is written at a time, and a cut begins when the previous one is complete.
2. A checkpoint is complete (its manifest exists) only when all its other files are on disk; only then are older ones
   removed.
3. An error is raised when the run next checks its cards, begins another save, or ends.
4. Memory that was freed since the last save is returned to the system: glibc keeps it in pieces, which grow."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from distqueue.checkpoint import release_freed
from distqueue.errors import StorageFull
from stalesync.process import in_flight
from stalesync.process.failures import RunFailed
from stalesync.process.run_log import add_note


class SaveFailed(RunFailed):
    """The controller's part of a checkpoint could not be written."""


ADVICE = (
    "the run ends because a checkpoint could not be written; those that are complete stay. Where there is no space, "
    "free some, or move the run's folder to another disk and set run.dir; then resume with run.resume=true"
)


class Saver:
    def __init__(self) -> None:
        self._writing: Future[float] | None = None
        """Gives the seconds of writing the checkpoint that was begun last; None: that was taken note of"""
        self._figures: dict[str, float] = {}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Measure the block, in which the run is paused for a cut. Wait first until the previous checkpoint is written;
        raise RunFailed if it could not be."""
        start = time.perf_counter()
        self.finish()
        cut = time.perf_counter()
        try:
            yield
        except (OSError, StorageFull) as error:
            failed = SaveFailed(_describe(error))
            add_note(failed, ADVICE)
            raise failed from error
        self._figures |= {"timing_s/save": time.perf_counter() - start, "timing_s/save/wait": cut - start}

    def begin(self, write: Callable[[], None], discard: Callable[[], None] = lambda: None) -> None:
        """Run ``write`` in the thread, and ``discard`` if that fails; return at once."""
        assert self._writing is None, "one checkpoint is written at a time"
        self._writing = in_flight.begin(_seconds_of, write, discard)

    @property
    def writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def check(self) -> None:
        """Raise RunFailed if a checkpoint could not be written."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def finish(self) -> None:
        """Wait for the thread; raise RunFailed if its checkpoint could not be written."""
        if self._writing is not None:
            self._figures["save/write_s"] = self._writing.result()
            self._writing = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a cut since the last call: seconds of the pause, seconds of it spent waiting for the
        previous checkpoint, and seconds of writing that one."""
        figures, self._figures = self._figures, {}
        return figures


def _seconds_of(write: Callable[[], None], discard: Callable[[], None]) -> float:
    start = time.perf_counter()
    try:
        write()
    except Exception as error:
        discard()
        if isinstance(error, RunFailed):
            add_note(error, ADVICE)
            raise
        add_note(failed := SaveFailed(_describe(error)), ADVICE)
        raise failed from error
    finally:
        release_freed()
    return time.perf_counter() - start


def _describe(error: Exception) -> str:
    return f"the controller failed in stage 'save': {type(error).__name__}: {error}"
