"""Whether a paced run kept its pace: what emulated cards took longer than what they stand for (`fusion.npu.pacer`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusion.costmodel.pace import Pace

TOLERANCE = 0.03
"""Overrun / modelled wall above which a run's times are not those of what it stands for."""


class PaceTally:
    """Adds up the steps of this start of the run. Says nothing where there is no pace."""

    def __init__(self, pace: Pace | None):
        self.pace = pace
        self._wall_s = self._lost_s = 0.0
        self._lost_by_kind: Counter[str] = Counter()

    def count(self, figures: dict[str, float]) -> dict[str, float]:
        """Takes a step's figures; returns them."""
        lost = sums(figures, "pace/overrun_s/")
        self._lost_by_kind.update(lost)
        self._lost_s += sum(lost.values())
        self._wall_s += sum(sums(figures, "pace/modelled_s/").values()) + figures.get("pace/waited_s", 0.0)
        return figures

    @property
    def overrun(self) -> float:
        """Of all cards and steps; 0 before the first."""
        return self._lost_s / self._wall_s if self._wall_s else 0.0

    def notes(self) -> list[str]:
        """The pace and, of a run that did not keep it, that its times mean nothing."""
        if self.pace is None:
            return []
        told = f"cards took the time of {self.pace}"
        if self.overrun <= TOLERANCE:
            return [f"{told}; overrun {self.overrun:.1%}"]
        most = ", ".join(f"{kind} {s:.1f} s" for kind, s in self._lost_by_kind.most_common(3))
        advice = "lower device.pace_speed or the number of cards"
        return [f"{told}; INVALID: overrun {self.overrun:.1%}, above {TOLERANCE:.0%} ({most} of all cards); {advice}"]


def sums(figures: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in figures.items() if name.startswith(prefix)}
