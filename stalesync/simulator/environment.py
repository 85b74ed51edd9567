"""Simulate environments: turns of a conversation, tokens of observations, seconds until they answer. Pure.

    sampled │ observation │ sampled │ observation │ sampled               even parts of the length that was drawn
            └ latency ────┘         └ latency ────┘       └ latency ► the conversation has ended

Latencies have a lognormal distribution: median ``latency_s``, ``spread`` the standard deviation of the logarithm.
Behind a share of the turns a branch begins: its prompt is the conversation so far, as long as it was, whose KV is
computed again behind the first prompt. A run finds more in the cache, and reads less where a template removes thoughts.

Invariant: what an environment does depends only on the seed, the request's id and the turn."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp
from statistics import NormalDist

import numpy as np

from fusion.inference.noise import request_key, uniforms
from stalesync.policy.admission_spec import AdmissionSpec

STREAM, BRANCH_STREAM = 19, 20
"""Streams of the noise, besides those of `stalesync.prompts.lengths.STREAMS`"""


@dataclass(frozen=True)
class EnvironmentSpec:
    """``turns`` of the model, at most; ``observation_tokens``: of each answer between two; ``latency_s``: modelled;
    ``branch_share``: of the turns that another follows, the share behind which a branch begins."""

    turns: int
    observation_tokens: int
    latency_s: float
    spread: float = 0.0
    branch_share: float = 0.0

    @property
    def observed(self) -> int:
        """Number of tokens of all observations of a conversation that has all its turns."""
        return (self.turns - 1) * self.observation_tokens

    def turn_ends(self, sampled: int) -> list[int]:
        """Return the lengths of the response, observations included, at which turns of ``sampled`` tokens end."""
        turns = min(self.turns, sampled)
        return [(turn + 1) * sampled // turns + turn * self.observation_tokens for turn in range(turns)]

    def turns_of(self, sampled: int) -> list[tuple[int, int]]:
        """Return the lengths of the response at which each turn begins and ends."""
        ends = self.turn_ends(sampled)
        return [(0, ends[0]), *((before + self.observation_tokens, end) for before, end in pairwise(ends))]

    def turn_end(self, generated: int, sampled: int) -> int:
        """Return the length at which the turn ends that is under way behind ``generated`` tokens."""
        ends = self.turn_ends(sampled)
        return ends[bisect_right(ends, generated)]

    def branches(self, seed: int, id: str, generated: int) -> bool:
        """Return whether a branch begins behind the turn of a conversation that ends at this length."""
        return 0 < self.branch_share and _uniform(seed, id, generated, BRANCH_STREAM) < self.branch_share

    def row_ends(self, seed: int, id: str, sampled: int) -> list[int]:
        """Return the lengths of the response, observations included, at which the branches of a conversation end."""
        *ends, last = self.turn_ends(sampled)
        return [*(end for end in ends if self.branches(seed, id, end)), last]

    def with_observations(self, spec: AdmissionSpec) -> AdmissionSpec:
        """Return the settings with the lengths of whole responses where the order knows those that are sampled."""
        sampled_of = spec.exact_lengths
        return replace(spec, exact_lengths=lambda group: [self.turn_ends(one)[-1] for one in sampled_of(group)])

    def draw_latency_s(self, seed: int, id: str, generated: int) -> float:
        """Return the modelled seconds until the environment answers to the turn that ends at this length."""
        if not self.spread:
            return self.latency_s
        uniform = _uniform(seed, id, generated, STREAM)
        return self.latency_s * exp(self.spread * NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9)))


def _uniform(seed: int, id: str, generated: int, stream: int) -> float:
    key = np.array([request_key(id)], np.uint64)
    return float(uniforms(seed, key, np.array([generated]), stream=stream)[0])
