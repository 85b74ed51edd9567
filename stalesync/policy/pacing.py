"""Report whether a paced run kept its pace, by the time that emulated cards took beyond that of the modelled cards
(`fusion.npu.pacer`)."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusion.costmodel.pace import Pace

TOLERANCE = 0.03
"""Ratio of overrun to modelled wall clock above which a run's times are invalid."""


class PaceTally:
    """Accumulate the overrun of all steps since the start or resume. ``pace``: None if cards are not paced."""

    def __init__(self, pace: "Pace | None"):
        self.pace = pace
        self._wall_s = self._lost_s = 0.0
        self._lost_by_kind: Counter[str] = Counter()

    def count(self, metrics: Mapping[str, float]) -> None:
        lost = sums(metrics, "pace/overrun_s/")
        self._lost_by_kind.update(lost)
        self._lost_s += sum(lost.values())
        self._wall_s += sum(sums(metrics, "pace/modelled_s/").values()) + metrics.get("pace/waited_s", 0.0)

    @property
    def overrun(self) -> float:
        """Ratio of overrun to modelled wall clock, over all cards and steps; 0 before the first step."""
        return self._lost_s / self._wall_s if self._wall_s else 0.0

    def notes(self) -> list[str]:
        """Return a line with the pace and, if the run did not keep it, that its times are invalid."""
        if self.pace is None:
            return []
        pace = f"cards took the time of {self.pace}"
        if self.overrun <= TOLERANCE:
            return [f"{pace}; overrun {self.overrun:.1%}"]
        largest = ", ".join(f"{kind} {s:.1f} s" for kind, s in self._lost_by_kind.most_common(3))
        advice = "lower device.pace_speed or the number of cards"
        return [
            f"{pace}; INVALID: overrun {self.overrun:.1%}, above {TOLERANCE:.0%} ({largest} of all cards); {advice}"
        ]


def sums(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
