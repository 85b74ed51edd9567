"""Close steps and write their rows: acknowledge samples, collect the metrics of a step, and record them everywhere."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distqueue import DistQueue
from fusion.telemetry import LiveView, RunFolder
from fusion.telemetry.page.cautions import CautionWatch
from fusion.training.interface import SKIPPED_IN_A_ROW
from stalesync.cards.cards import Cards
from stalesync.loop.step_metrics import StepMetrics
from stalesync.loop.update import TRAIN, Updater
from stalesync.policy.pacing import PaceTally
from stalesync.policy.staleness import StalenessLedger
from stalesync.process.failures import GradientsNotFinite
from stalesync.prompts import PromptSource

RESTARTS = "rollout/engine_restarts"
MAX_SKIPPED_IN_A_ROW = 3
"""Number of updates in a row with gradients that are not finite, with which a run ends: one alone may be an accident"""


@dataclass(kw_only=True)
class StepRows:
    """Closes the steps of a run, one after the other, and writes their rows, as each `Step` asks.
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
