"""End this process at once where its main thread waits in Ray and cannot: from another thread, with a report.

Ray would wait for a minute, and then end the process without a report. Ray's guard and those of the rewards end what is
left, so that nothing has to be ended in order."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from stalesync.process.failures import RunFailed
from stalesync.process.ray_guard import GIVING_UP, Guard, Report
from stalesync.process.ray_processes import NAMES, watching_start
from stalesync.process.stopping import describe_stop, held_too_long, leave, raise_in_main

ShowReport = Callable[[str], None]
"""Shows the report of a run, given its outcome"""


class Ender:
    """Called by the threads that watch Ray. ``guard``: of a Ray that was started here; ``report`` records an error;
    ``show_report`` is called after that."""

    def __init__(self, guard: Guard | None, report: Report | None, show_report: ShowReport) -> None:
        self._guard, self._report, self._show_report = guard, report, show_report
        self._stderr = 2
        self.shuts_down = False
        """The main thread is not to be interrupted any more"""

    def interrupt(self, error: RunFailed) -> None:
        """Interrupt the main thread, which raises the error."""
        if not self.shuts_down:
            raise_in_main(error)

    def give_up(self, error: RunFailed) -> NoReturn:
        """Report the error and end this process."""
        assert self._guard is not None and self._report is not None
        self._guard.send(GIVING_UP)
        try:
            self._report(error, self._stderr)
            self._show_report("failed")
        finally:
            os._exit(1)

    @contextmanager
    def watching_start(self) -> Iterator[None]:
        """End this process when a signal has waited too long for the end of the block, which starts Ray or joins a
        cluster, or if an error can be reported, when a process of Ray has ended inside it."""
        self._stderr = os.dup(2)  # inside the block, 2 becomes the log of Ray's start
        try:
            with watching_start(self.give_up, NAMES if self._report else (), poll=self._check_stop):
                yield
        finally:
            os.close(self._stderr)
            self._stderr = 2

    def _check_stop(self) -> None:
        if (stop := held_too_long()) is not None:
            if self._guard is not None:
                self._guard.send(GIVING_UP)
            os.dup2(self._stderr, 2)
            try:
                self._show_report(describe_stop(stop))
            finally:
                leave(stop)
