"""Report what drafts have saved since the last report."""

from dataclasses import replace

from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.exchange import ExchangeTotals
from fusion.rollout.drafts.suffix_index import HISTORY, PHRASES, SIBLING
from fusion.rollout.drafts.texts import DraftTotals
from fusion.telemetry import Metrics
from fusion.telemetry.memory import MIB

EXCHANGED = ("sent_bytes", "sent_tokens", "received_bytes")
"""Fields of `ExchangeTotals`: `rollout/draft_…`, totals of all engines"""


class DraftReport:
    """Add a drafter's metrics: means over all cards' drafts, so that ranks that draft alike do not count twice."""

    def __init__(self, drafter: TextDrafter) -> None:
        self._drafter, self._before, self._exchanged = drafter, DraftTotals(), ExchangeTotals()

    def add_to(self, metrics: Metrics) -> None:
        """Add `rollout/draft_hit_rate` (sequences with a draft, of those for which one was looked up),
        `rollout/draft_accepted_length_mean` (tokens of a verified draft that were kept),
        `rollout/draft_acceptance_{siblings,history,phrases}` (share of drafted tokens that were kept),
        `timing_s/draft`, `rollout/draft_mib_max`, `rollout/draft_dropped_max` and `rollout/draft_expired_max` (prompts
        since the run began); and those of the exchange with other engines, if there is one."""
        now, before = self._drafter.totals, self._before
        self._before = replace(now, drafted=list(now.drafted), accepted=list(now.accepted))
        if asked := now.asked - before.asked:
            metrics.add("rollout/draft_hit_rate", (now.found - before.found) / asked, asked)
        if verified := now.verified - before.verified:
            accepted = sum(now.accepted) - sum(before.accepted)
            metrics.add("rollout/draft_accepted_length_mean", accepted / verified, verified)
        for name, source in (("siblings", SIBLING), ("history", HISTORY), ("phrases", PHRASES)):
            if drafted := now.drafted[source] - before.drafted[source]:
                accepted = now.accepted[source] - before.accepted[source]
                metrics.add(f"rollout/draft_acceptance_{name}", accepted / drafted, drafted)
        metrics.add("timing_s/draft", now.seconds - before.seconds)
        metrics.add("rollout/draft_mib_max", self._drafter.texts.nbytes / MIB)
        metrics.add("rollout/draft_dropped_max", now.dropped)
        metrics.add("rollout/draft_expired_max", now.expired)
        if self._drafter.exchange is not None:
            metrics.add("rollout/draft_read_tokens", now.read - before.read, rule="sum")
            self._add_exchanged(self._drafter.exchange.totals, metrics)

    def _add_exchanged(self, now: ExchangeTotals, metrics: Metrics) -> None:
        """Add `rollout/draft_{sent,received}_bytes`, `rollout/draft_sent_tokens`, `rollout/draft_exchange_failures`
        (engines that have lost the store) and `timing_s/draft_exchange`; of the store since the run began
        `rollout/draft_store_mib_max`, `rollout/draft_store_dropped_max` and `rollout/draft_store_expired_max`."""
        before, self._exchanged = self._exchanged, replace(now)
        for name in EXCHANGED:
            metrics.add(f"rollout/draft_{name}", getattr(now, name) - getattr(before, name), rule="sum")
        metrics.add("rollout/draft_exchange_failures", now.failures - before.failures, rule="sum")
        metrics.add("timing_s/draft_exchange", now.seconds - before.seconds)
        metrics.add("rollout/draft_store_mib_max", now.store_bytes / MIB)
        metrics.add("rollout/draft_store_dropped_max", now.dropped)
        metrics.add("rollout/draft_store_expired_max", now.expired)
