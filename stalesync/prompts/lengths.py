"""Draw response lengths with the long tail of reasoning models, reproducible for a seed.

    length = median x exp(0.89 z(row) + 0.43 z(prompt, member)), at most the cap; one in a hundred is the cap

Within a checkpoint 65 % of the variance of lengths is due to the prompt and 26 % to sampling; including the responses
at the cap this is an ICC of 0.73 on the log scale (trace of TailSieve; the two sigmas follow from its median of 1160
and 90th percentile of 4115). The mean is about 1.6 times the median, the 99th percentile about 10 times.

Invariants: a length depends only on the seed, the prompt's id and the number of the group member, so that all responses
keep their lengths when a run is repeated with another schedule, cards or staleness bound. What is due to the prompt is
due to its row, so that it comes back in every epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, hypot, log
from statistics import NormalDist

import numpy as np

from fusion.inference.config import FORCED_SPREAD, RolloutConfig
from fusion.inference.noise import request_key, uniforms
from fusion.rollout.length_history import row_of

STREAMS = {"prompt": 16, "within": 17, "runaway": 18}
"""Streams of the noise; the sampler's is 0."""


@dataclass(frozen=True)
class ForcedLengths:
    """Draw response lengths. ``median``, ``cap``: the median and the maximum length in tokens; ``spread``: the
    standard deviations of the logarithm between rows and within a group, and the share of responses at the cap."""

    seed: int
    median: float
    cap: int
    spread: tuple[float, float, float] = FORCED_SPREAD

    @classmethod
    def of(cls, config: RolloutConfig, seed: int) -> "ForcedLengths | None":
        """Create the lengths of a run; None where the policy ends its responses."""
        if config.sampling.forced_median is None:
            return None
        between, within, runaway = config.sampling.forced_spread
        return cls(seed, config.sampling.forced_median, config.max_response_length, (between, within, runaway))

    @property
    def mean(self) -> float:
        between, inside, runaway = self.spread
        sigma, cut = hypot(between, inside), log(self.cap / self.median)
        if not sigma:
            drawn = min(self.median, self.cap)
        else:  # of a lognormal distribution that is cut off at the cap
            below = NormalDist(sigma * sigma, sigma).cdf(cut)
            drawn = self.median * exp(sigma * sigma / 2) * below + self.cap * (1 - NormalDist(0, sigma).cdf(cut))
        return (1 - runaway) * drawn + runaway * self.cap

    def __call__(self, prompt_id: str, member: int) -> int:
        """Return the number of tokens of the response of a group member: 1 … cap."""
        return self.of_members(prompt_id, range(member, member + 1))[0]

    def of_members(self, prompt_id: str, members: range) -> list[int]:
        """Return the lengths of several members of a group."""
        return self.of_groups([prompt_id], members)[0]

    def of_groups(self, prompt_ids: Sequence[str], members: range) -> list[list[int]]:
        """Return the lengths of several members of each group."""
        keys = np.array([request_key(id) for id in prompt_ids], np.uint64)
        rows = np.array([request_key(f"e0-{row_of(id)}") for id in prompt_ids], np.uint64)
        size, (between, inside, runaway) = len(members), self.spread
        prompts = self._normals("prompt", rows, np.zeros(len(keys), np.int64))
        each, numbers = np.repeat(keys, size), np.tile(np.array(members, np.int64), len(keys))
        within, chances = self._normals("within", each, numbers), self._uniforms("runaway", each, numbers)
        return [
            [
                self.cap if chance < runaway else self._length(between * prompt + inside * own)
                for own, chance in zip(within[start : start + size], chances[start : start + size], strict=True)
            ]
            for start, prompt in zip(range(0, len(each), size), prompts, strict=True)
        ]

    def _length(self, spread: float) -> int:
        return max(1, min(self.cap, round(self.median * exp(spread))))

    def _uniforms(self, purpose: str, keys: np.ndarray, members: np.ndarray) -> list[float]:
        return uniforms(self.seed, keys, members, stream=STREAMS[purpose]).tolist()

    def _normals(self, purpose: str, keys: np.ndarray, members: np.ndarray) -> list[float]:
        draw = NormalDist().inv_cdf
        return [draw(uniform * (1 - 2.0**-52) + 2.0**-54) for uniform in self._uniforms(purpose, keys, members)]
