"""Take each step of a run through its life, and write its row of metrics.

    open ─ its commands ─► closing ─► closed ─ its row is written ─► logged
                              │
                              └ its samples are acknowledged to the queue, while the cards switch for the next step

Invariants: each transition is made once, however often it is asked for; a step is logged after it is closed, or
after its run has failed; its row is written at most once, also if that fails."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from distqueue import DistQueue
from fusion.telemetry import LiveView, RunFolder
from fusion.telemetry.page.cautions import CautionWatch
from fusion.training.interface import SKIPPED_IN_A_ROW
from stalesync.cards.cards import Cards
from stalesync.loop.step_metrics import StepMetrics
from stalesync.loop.update import TRAIN, Updater
from stalesync.policy.pacing import PaceTally
from stalesync.policy.staleness import StalenessLedger
from stalesync.process import in_flight
from stalesync.process.failures import GradientsNotFinite, logging_errors
from stalesync.prompts import PromptSource

RESTARTS = "rollout/engine_restarts"
MAX_SKIPPED_IN_A_ROW = 3
"""Number of updates in a row with gradients that are not finite, with which a run ends: one alone may be an accident"""


@dataclass(kw_only=True)
class StepRows:
    """Close the steps of a run, one after the other, and write their rows, as each `Step` asks.
    ``take_save_metrics``: returns the metrics of the last cut."""

    cards: Cards
    queue: DistQueue
    ledger: StalenessLedger
    source: PromptSource
    updater: Updater
    step_metrics: StepMetrics
    folder: RunFolder
    view: LiveView
    pace: PaceTally
    take_save_metrics: Callable[[], Mapping[str, float]]
    extra: dict[str, float] = field(default_factory=dict)
    """Metrics of evaluations, for the next row"""
    text_server_note: str = ""
    """The step in which engines have lost the server through which they exchange text, in words"""
    _cautions: CautionWatch = field(default_factory=CautionWatch)

    def figures(self) -> dict[str, float]:
        """Return the figures of the ledger and of the data at the end of a step."""
        return {**self.ledger.metrics(), **self.source.metrics()}

    def acknowledge(self) -> dict[str, float]:
        """Acknowledge the samples of the last step; return the queue's figures after it. In one call, which reaches the
        queue before any sample of the next step does."""
        trained = self.updater.take_trained()
        return self.queue.ack_with_stats(TRAIN, trained) if trained else self.queue.stats()

    def take_metrics(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the step, ``figures`` included; those of the next one begin."""
        return self.step_metrics.close(self.cards.reported_until_ns, figures)

    def log(self, number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of step ``number``, with those of evaluations and cuts. Raise GradientsNotFinite if too many
        updates in a row were skipped."""
        extra, self.extra = self.extra, {}
        self.pace.count(metrics)
        if metrics.get("rollout/draft_exchange_failures") and not self.text_server_note:
            self.text_server_note = (
                f"step {number}: the server of the engines' text has ended; drafts are from each engine's own text"
            )
            self.view.note(self.text_server_note)
        if RESTARTS in extra:  # those of the step come on top
            extra[RESTARTS] += metrics.get(RESTARTS, 0)
        self.folder.log(number, {**metrics, **extra, **self.take_save_metrics()})
        self.view.update(number, metrics)
        for caution in self._cautions.observe(number, metrics):
            self.view.note(f"step {number}: {caution}")
        if (skipped := int(metrics.get(SKIPPED_IN_A_ROW, 0))) >= MAX_SKIPPED_IN_A_ROW:
            raise GradientsNotFinite(skipped, number)


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
