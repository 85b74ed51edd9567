"""Report what drafts have saved since the last report."""

from __future__ import annotations

from dataclasses import replace

from fusion.rollout.drafts.drafter import DraftTotals, TextDrafter
from fusion.rollout.drafts.suffix_index import HISTORY, SIBLING
from fusion.telemetry import Metrics
from fusion.telemetry.memory import MIB


class DraftReport:
    """Adds a drafter's metrics: means over the drafts of all cards, so that ranks that draft alike do not count
    twice."""

    def __init__(self, drafter: TextDrafter) -> None:
        self._drafter, self._before = drafter, DraftTotals()

    def add_to(self, metrics: Metrics) -> None:
        """Adds `rollout/draft_hit_rate` (sequences with a draft, of those for which one was looked up),
        `rollout/draft_acceptance_{siblings,history}` (share of drafted tokens that were kept), `timing_s/draft` and
        `rollout/draft_mib_max`."""
        now, before = self._drafter.totals, self._before
        self._before = replace(now, drafted=list(now.drafted), accepted=list(now.accepted))
        if asked := now.asked - before.asked:
            metrics.add("rollout/draft_hit_rate", (now.found - before.found) / asked, asked)
        for name, source in (("siblings", SIBLING), ("history", HISTORY)):
            if drafted := now.drafted[source] - before.drafted[source]:
                accepted = now.accepted[source] - before.accepted[source]
                metrics.add(f"rollout/draft_acceptance_{name}", accepted / drafted, drafted)
        metrics.add("timing_s/draft", now.seconds - before.seconds)
        metrics.add("rollout/draft_mib_max", self._drafter.nbytes / MIB)
