"""Decide how many drafted tokens a step verifies, from what steps have cost and how often drafts were right. Pure.

    acceptance   share of a token in the text ──► how often such a token was right                       (measured)
    cost         seconds of a step = c0 + c1 · decodes + c2 · drafted sequences + c3 · drafted tokens     (fitted)
    choose       the most probable tokens of all sequences, as many as make the most tokens a second; those of
                 probes, which siblings draft from, and of requests that have come back (the tail) come first

The marginal-benefit rule of Seer (arXiv 2511.14617, section 3.4) with costs that are measured during the run: on
a card whose decode is bound by bandwidth drafted tokens are almost free, on a busy one they are not worth their time,
and `choose` takes none. Steps with few and with many sequences are fitted apart, as their costs are not on one line.
What attempts have cost without gain is bounded besides (`losses`): `skips` holds further ones back.

Invariants (property-tested): except in steps that only measure, what `choose` takes promises more tokens a second than
any other number of tokens in this order, and at least `MIN_GAIN` times those of taking nothing; else it takes nothing.
Whatever a step costs with drafts and without, a run takes at most 1.05 times as long as without, after 1,000 steps.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from fusion.inference.verification import StepCost
from fusion.rollout.drafts.losses import DraftLosses

MIN_GAIN = 1.03
"""Drafts are verified only if they promise this many times the tokens a second of a step without."""

URGENT_WEIGHT = 2.0
"""How many times as probable a token of a probe, or of a request that has come back, counts in the order of tokens"""

FORGET = 0.98
"""Weight of the last step's past in the fit, per step"""

EXPLORE_EVERY = 200
"""Steps without drafts after which one is verified, to measure what it costs now"""

FIRST_PLAIN_AFTER = 16
"""Steps with drafts after which one goes without, to measure what it costs now; then after twice as many, up to
`EXPLORE_EVERY`. Steps that all draft do not determine what one without would cost"""

MIN_EXPLORED = 8
"""Tokens, at least, of the largest steps that are verified only to measure; with many sequences two of each"""

LOOK_EVERY, LOOK_EVERY_EMPTY = 16, 4
"""While drafts do not pay, or where there are none, they are looked up after 1, 2, 4 and 8 steps, then every this many:
to look for them costs time, too"""

PLAIN_STEPS_FITTED, FIT_EVERY = 32, 16
"""After this many steps without drafts, every sixteenth one is fitted: to fit one costs time, too"""

MAX_OUTLIER = 3.0
"""A step counts at most as this many times what was expected of it."""

MIN_STEPS, MIN_PLAIN_STEPS = 8, 2
"""Steps with drafts that are verified at first only to measure, and without any, to which they are compared"""

MAX_VARIANCE = 1e6
"""Bound of the variance of a coefficient that the steps of a run do not determine"""

MAX_DEPTH = 16
"""Tokens of a path of a draft"""

ACCEPTANCE_BINS = 16
PRIOR = 4.0
"""Drafted tokens that the share itself counts as"""

MEMORY = 1000
"""The weight of an observation falls to about a third while this many further tokens are observed."""


class Acceptance:
    """How often a drafted token was right if all before it were, by its share in the text (`suffix_index`)."""

    def __init__(self) -> None:
        self._drafted, self._accepted = np.zeros(ACCEPTANCE_BINS), np.zeros(ACCEPTANCE_BINS)

    def observe(self, shares: np.ndarray, accepted: np.ndarray) -> None:
        """Record drafted tokens behind tokens that were kept, [n] both: their share, and whether they were kept."""
        bins = np.minimum((shares * ACCEPTANCE_BINS).astype(np.int64), ACCEPTANCE_BINS - 1)
        kept = 1 / (1 + len(bins) / MEMORY)
        self._drafted = kept * self._drafted + np.bincount(bins, minlength=ACCEPTANCE_BINS)
        self._accepted = kept * self._accepted + np.bincount(bins, accepted, ACCEPTANCE_BINS)

    def by_share(self) -> np.ndarray:
        """Return the expected acceptance of a token by its share, float64 [bins]; the share itself as long as little is
        known."""
        shares = (np.arange(ACCEPTANCE_BINS) + 0.5) / ACCEPTANCE_BINS
        return (self._accepted + PRIOR * shares) / (self._drafted + PRIOR)


class CostFit:
    """Fit the seconds of a step by recursive least squares with forgetting; those of the drafter, which do not depend
    on how much is verified, are averaged apart. Where all drafts are about equally long, the steps do not separate a
    draft from its tokens: one of the two coefficients may be negative, and only their sum has a meaning."""

    def __init__(self, like: CostFit | None = None) -> None:
        self.drafting_s: float = 0.0 if like is None else like.drafting_s
        """Mean seconds of the drafter in a step with drafts"""
        self.weights: np.ndarray = np.zeros(4) if like is None else like.weights.copy()
        self._covariance = np.diag([1e2] * 4)
        self.steps: int = 0 if like is None else like.steps
        self.plain_steps: int = 0 if like is None else like.plain_steps
        """Of `steps`, those without drafts"""

    def observe(self, step: StepCost) -> float:
        """Fit a step; return the seconds that it counts as. Without a verified draft it could have gone without the
        drafter's seconds, too."""
        seconds = step.seconds - step.drafting_s
        x = np.array([1.0, step.decodes, step.drafted, step.tokens])
        expected = float(x @ self.weights)
        if self.steps > MIN_STEPS and expected > 0:
            seconds = min(seconds, MAX_OUTLIER * expected)
        gain = self._covariance @ x / (FORGET + x @ self._covariance @ x)
        self.weights = self.weights + gain * (seconds - expected)
        self._covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / FORGET
        self._covariance = (self._covariance + self._covariance.T) / 2
        # Directions that are not visited would grow without end; scaled on both sides, it stays positive definite.
        scale = np.minimum(1.0, np.sqrt(MAX_VARIANCE / np.diag(self._covariance)))
        self._covariance *= np.outer(scale, scale)
        self.steps += 1
        self.plain_steps += not step.drafted
        if not step.drafted:
            return seconds
        drafting_s, weight = step.drafting_s, max(1 - FORGET, 1 / (self.steps - self.plain_steps))
        if self.steps - self.plain_steps > MIN_STEPS:
            drafting_s = min(drafting_s, MAX_OUTLIER * self.drafting_s)
        self.drafting_s += weight * (drafting_s - self.drafting_s)
        return seconds + drafting_s

    def expected(self, decodes: int, drafted: int, tokens: int) -> float:
        """Return the expected seconds of a step."""
        c0, c1, c2, c3 = self.weights.tolist()
        verified = c0 + c1 * decodes + max(c2 * drafted + c3 * tokens, 0.0)
        return max(verified, 1e-9) + (self.drafting_s if drafted else 0.0)

    def of(self, decodes: np.ndarray, drafted: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the expected seconds of steps, [n] each."""
        c0, c1, c2, c3 = self.weights
        verified = c0 + c1 * decodes + np.maximum(c2 * drafted + c3 * tokens, 0)
        return np.maximum(verified, 1e-9) + self.drafting_s * (drafted > 0)


class DraftBudget:
    """Choose how much of the drafts of a step is verified."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._fits: dict[int, CostFit] = {}
        """Costs by size, of the sizes that were measured"""
        self._steps_without: dict[int, int] = defaultdict(int)
        """Size → steps since drafts were verified"""
        self._empty: dict[int, bool] = defaultdict(bool)
        """Size → whether there was no draft when they were looked up last"""
        self._steps_with: dict[int, int] = defaultdict(int)
        """Size → steps with drafts since one went without"""
        self._plain_after: dict[int, int] = defaultdict(lambda: FIRST_PLAIN_AFTER)
        """Size → steps with drafts after which one goes without"""
        self._num_plain = 0
        """Steps without drafts"""
        self._explored: dict[int, int] = defaultdict(int)
        """Size → steps that were verified only to measure"""
        self._began = False
        """Whether a step has gone without drafts, or one was measured"""
        self.losses = DraftLosses()

    def max_depth(self, request: str) -> int:
        """Return how many tokens behind a sequence may be drafted."""
        return MAX_DEPTH

    def observe_draft(self, request: str, drafted: int, kept: int) -> None:
        """Ignore single drafts."""

    def end(self, request: str) -> None:
        """Ignore the end of a request."""

    def observe_step(self, step: StepCost) -> None:
        """Record a step."""
        num_sequences = step.decodes + step.drafted
        size = _size(num_sequences)
        seconds = step.seconds
        if step.prefills:
            fit = self._nearest(size)
        else:
            if size not in self._fits:
                self._fits[size] = CostFit(self._nearest(size))
            fit = self._fits[size]
            self._num_plain += not step.drafted
            if step.drafted or fit.plain_steps < PLAIN_STEPS_FITTED or self._num_plain % FIT_EVERY == 0:
                seconds = fit.observe(step)
        self.losses.observe(step.seconds, _lost(step, seconds, fit) if step.drafted else step.drafting_s)

    def skips(self, num_sequences: int) -> bool:
        """Whether a step of this many sequences goes without drafts, so that none need be looked up: most steps while
        they do not pay, and all while too much was lost."""
        size = _size(num_sequences)
        steps = self._steps_without[size]
        skips = steps % (LOOK_EVERY_EMPTY if self._empty[size] else LOOK_EVERY) > 0 and steps.bit_count() > 1
        skips = skips or not self.losses.allows
        self._steps_without[size] += skips
        return skips

    def choose(
        self,
        owners: np.ndarray,
        probabilities: np.ndarray,
        num_sequences: int,
        *,
        max_tokens: int = 1 << 30,
        urgent: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return which drafted tokens are verified, bool [n], at most ``max_tokens``.

        Args:
            owners: int [n], the sequence of each token, in order.
            probabilities: float64 [n], that it and all before it are right; a token comes after the one before it.
            num_sequences: that decode in this step, with a draft or without.
            urgent: bool [n], tokens of sequences that come first; None: none.
        """
        chosen, size = np.zeros(len(owners), bool), _size(num_sequences)
        self._empty[size] = not len(owners)
        if not len(owners):
            self._began = True
            self._steps_without[size] += 1
            return chosen
        fit = self._nearest(size)
        order = in_order(probabilities, urgent)[:max_tokens]
        best = 0
        if not self._began and (fit is None or not fit.plain_steps):
            self._began = True  # what a step costs without drafts is measured first
        elif self._is_to_explore(size, fit):
            # In turns many tokens, half as many, and these in few deep drafts: separates the cost of a token from a
            # draft's.
            kind = self._explored[size] % 3
            if kind == 2:
                order = np.arange(len(owners))[:max_tokens]
            best = min(len(order), max(2 * num_sequences, MIN_EXPLORED) // (2 if kind else 1))
            self._explored[size] += 1
        elif fit is not None and fit.plain_steps >= MIN_PLAIN_STEPS:
            rates = _rates(fit, owners[order], probabilities[order], num_sequences)
            best = int(rates.argmax())
            if rates[best] < MIN_GAIN * rates[0]:
                best = 0
            elif self._steps_with[size] >= self._plain_after[size]:
                best, self._plain_after[size] = 0, min(2 * self._plain_after[size], EXPLORE_EVERY)
        self._steps_without[size] = self._steps_without[size] + 1 if best == 0 else 0
        self._steps_with[size] = self._steps_with[size] + 1 if best else 0
        chosen[order[:best]] = True
        return chosen

    def _is_to_explore(self, size: int, fit: CostFit | None) -> bool:
        unknown = (fit is None or fit.steps < MIN_STEPS) and self._explored[size] < MIN_STEPS
        return unknown or self._steps_without[size] >= EXPLORE_EVERY

    def _nearest(self, size: int) -> CostFit | None:
        """Return the costs of the nearest size that was measured."""
        nearest = min(self._fits, key=lambda other: abs(other - size), default=None)
        return None if nearest is None else self._fits[nearest]


def _lost(step: StepCost, seconds: float, fit: CostFit | None) -> float:
    """Return the seconds by which drafts have made a step longer than what they saved, negative: shorter. ``seconds``:
    that it counts as. Of a step that also prefills only what is expected of the drafts is known: it saves nothing."""
    num_sequences = step.decodes + step.drafted
    if fit is None or not fit.plain_steps:  # assume that a drafted token costs as much as a decoded one
        return step.drafting_s + seconds * (step.tokens - step.accepted) / (num_sequences + step.tokens)
    plain = fit.expected(num_sequences, 0, 0)
    saved = plain * step.accepted / num_sequences
    if not step.prefills:
        return seconds - plain - saved
    if fit.steps == fit.plain_steps:  # the same assumption
        added = plain * step.tokens / num_sequences
    else:
        added = fit.expected(step.decodes, step.drafted, step.tokens) - fit.drafting_s - plain
    return max(0.0, added + step.drafting_s - saved)


def _rates(fit: CostFit, owners: np.ndarray, probabilities: np.ndarray, num_sequences: int) -> np.ndarray:
    """Return the expected tokens a second of a step that verifies the first 0, 1, … of these tokens."""
    is_first = np.zeros(len(owners))
    is_first[np.unique(owners, return_index=True)[1]] = 1
    drafted = np.concatenate([[0.0], np.cumsum(is_first)])
    gains = np.concatenate([[0.0], np.cumsum(probabilities)])
    return (num_sequences + gains) / fit.of(num_sequences - drafted, drafted, np.arange(len(owners) + 1.0))


def in_order(probabilities: np.ndarray, urgent: np.ndarray | None) -> np.ndarray:
    """Return the order in which tokens are taken, int64 [n]: `DraftBudget.choose`."""
    weighted = probabilities if urgent is None else probabilities * np.where(urgent, URGENT_WEIGHT, 1.0)
    return np.argsort(-weighted, kind="stable")


def _size(num_sequences: int) -> int:
    """Return the size of a step, one for similar numbers of sequences: 1, 2, 3-4, 5-8, …"""
    return (max(1, num_sequences) - 1).bit_length()
