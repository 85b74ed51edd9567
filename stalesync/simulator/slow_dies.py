"""Draw which dies are slow, and by how much. Pure.

    share of slow dies ─ seed, number of the die ─► factor of its seconds: 1, or evenly between two bounds

Dies that compute together take the seconds of the slowest: those of an engine, and all that train, as each update waits
for the gradients of all. So more dies make a synchronous step longer, while other engines go on beside a slow one.

Invariant (property-tested): the factor of a die depends on the seed and its number only: a cluster contains the factors
of a smaller one."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fusion.inference.noise import uniforms

STREAM = 20
"""Stream of the noise, besides that of `stalesync.simulator.environment`"""


@dataclass(frozen=True)
class SlowDies:
    """``share`` of the dies take longer, by ``least`` to ``most`` of the usual seconds."""

    share: float = 0.0
    least: float = 0.05
    most: float = 0.30

    def factor(self, seed: int, dies: Iterable[int]) -> float:
        """Return the factor of the slowest of some dies, at least 1."""
        if not self.share:
            return 1.0
        keys = np.fromiter(dies, np.uint64)
        chosen, by = (uniforms(seed, keys, np.full(len(keys), draw), stream=STREAM) for draw in (0, 1))
        slower = np.where(chosen < self.share, self.least + (self.most - self.least) * by, 0.0)
        return 1.0 + float(slower.max(initial=0.0))

    def __str__(self) -> str:
        slow = f"{self.share:.2%} of the dies slow by {self.least:.0%} to {self.most:.0%}"
        return slow if self.share else "no slow die"
