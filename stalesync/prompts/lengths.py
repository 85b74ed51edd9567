"""Draws response lengths with the long tail of reasoning models, reproducible for a seed.

    length = median x exp(0.89 z(prompt) + 0.43 z(prompt, member)), at most the cap; one in a hundred is the cap

Within a checkpoint 65 % of the variance of lengths is due to the prompt and 26 % to sampling; including the responses
at the cap this is an ICC of 0.73 on the log scale (trace of TailSieve; the two sigmas follow from its median of 1160
and 90th percentile of 4115). The mean is about 1.6 times the median, the 99th percentile about 10 times.

Invariant: a length depends only on the seed, the prompt's id and the number of the group member, so that all responses
keep their lengths when a run is repeated with another schedule, cards or staleness bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from statistics import NormalDist

import numpy as np

from fusion.inference.noise import request_key, uniforms

SIGMA_PROMPT, SIGMA_WITHIN = 0.89, 0.43
RUNAWAY = 0.01
STREAMS = {"prompt": 16, "within": 17, "runaway": 18}
"""Streams of the noise; the sampler's is 0."""


@dataclass(frozen=True)
class ForcedLengths:
    """Draws response lengths. ``median``, ``cap``: the median and the maximum length in tokens."""

    seed: int
    median: float
    cap: int

    def __call__(self, prompt_id: str, member: int) -> int:
        """Returns the number of tokens of the response of a group member: 1 … cap."""
        key = request_key(prompt_id)
        if self._uniform("runaway", key, member) < RUNAWAY:
            return self.cap
        spread = SIGMA_PROMPT * self._normal("prompt", key, 0) + SIGMA_WITHIN * self._normal("within", key, member)
        return max(1, min(self.cap, round(self.median * exp(spread))))

    def _uniform(self, purpose: str, key: int, member: int) -> float:
        return float(uniforms(self.seed, np.array([key], np.uint64), np.array([member]), stream=STREAMS[purpose])[0])

    def _normal(self, purpose: str, key: int, member: int) -> float:
        return NormalDist().inv_cdf(self._uniform(purpose, key, member) * (1 - 2.0**-52) + 2.0**-54)
