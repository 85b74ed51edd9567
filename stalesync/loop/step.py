"""Take each step of a run through its life.

    open ─ its commands ─► closing ─► closed ─ its row is written ─► logged
                              │
                              └ its samples are acknowledged to the queue, while the cards switch for the next step

Invariants: each transition is made once, however often it is asked for; a step is logged after it is closed, or
after its run has failed; its row is written at most once, also if that fails."""

from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

from stalesync.process import in_flight
from stalesync.process.failures import logging_errors

if TYPE_CHECKING:
    from stalesync.loop.step_rows import StepRows


class Step:
    """Step ``number`` of a run, from 1, which ``accounts`` close and log. ``logged``: the step before the first, or
    that of a checkpoint."""

    def __init__(self, number: int, accounts: "StepRows", *, logged: bool = False) -> None:
        self.number = number
        self.state: Literal["open", "closing", "closed", "logged"] = "logged" if logged else "open"
        self._accounts = accounts
        self._figures: dict[str, float] = {}
        self._acknowledged: Future[dict[str, float]] | None = None
        """The queue's figures, while the step is closing"""
        self._metrics: dict[str, float] = {}
        """The row, once the step is closed"""

    def begin_close(self) -> None:
        """Begin to acknowledge the samples of the step. Its metrics may be added to until `close`."""
        if self.state == "open":
            self.state = "closing"
            self._figures = self._accounts.figures()
            self._acknowledged = in_flight.begin(self._accounts.acknowledge)

    def close(self) -> None:
        """Take the metrics of the step, once its samples are acknowledged."""
        self.begin_close()
        if self.state == "closing":
            assert self._acknowledged is not None
            self._metrics = self._accounts.take_metrics({**self._figures, **self._acknowledged.result()})
            self.state = "closed"

    def log(self) -> None:
        self.close()
        self._log()

    def log_after_failure(self) -> None:
        """Write the row of the step after its run has failed. If it is not closed, the row is without the queue's
        figures: the queue may have ended. An error in this is logged, not raised."""
        with logging_errors("logging the last step's metrics"):
            if self.state in ("open", "closing"):
                figures = self._accounts.figures() if self.state == "open" else self._figures
                self._metrics = self._accounts.take_metrics(figures)
            self._log()

    def _log(self) -> None:
        if self.state != "logged":
            self.state = "logged"
            self._accounts.log(self.number, self._metrics)
