"""Define the interface of all algorithms, and the implementation that most of them share.

    controller    filter_rule(rewards of a group) ─► None, or the name of the rule that excludes the group
                  advantages(rewards_B, groups_B, response_lengths_B) ─► advantages_B, trained_B
                     = estimate(shaped rewards), which each algorithm defines
    trainer       weigh(sequences) ─► the same with the weight of each token (`aggregation`)
                  loss(tokens) ─► correction's weight · clipped ratio · advantage (+ KL), token by token

All methods are pure. An algorithm is a subclass that overrides what its paper changes."""

import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fusion.training.algorithms.aggregation import weigh
from fusion.training.algorithms.baseline import FloatArray, IntArray, number_groups
from fusion.training.batch import Sequences
from fusion.training.config import AlgorithmConfig
from fusion.training.corrections import make_correction
from fusion.training.loss import LossInput, LossOutput, clipped_loss, k3_divergence, log_ratio

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

Reward = float | None
"""None or NaN if the reward failed."""


class Algorithm:
    """Base class of the algorithms. ``max_response_length``: in tokens; used by the constant normaliser and the penalty
    on overlong responses."""

    name: str
    aggregation: str = "token_mean"
    """Default of `algorithm.loss_aggregation`, one of `config.AGGREGATIONS`."""
    filters: bool = False
    """Whether `filter_rule` may exclude a group."""
    by_group: bool = True
    """Whether the advantages of a group depend on no other group."""
    overlong_share: float = 0.0
    """Default overlong buffer as a fraction of max_response_length."""

    def __init__(self, config: AlgorithmConfig, max_response_length: int):
        self.config, self.max_response_length = config, max_response_length
        self.correct = make_correction(config)

    def filter_rule(self, rewards: Sequence[Reward]) -> str | None:
        """Return the name of the rule that excludes a group with these unshaped rewards; None: it is trained. A class
        that overrides this sets `filters`."""
        return None

    def advantages(
        self,
        rewards: Sequence[Reward],
        groups: Sequence[Hashable],
        response_lengths: Sequence[int],
        reference_kl: Sequence[float] | None = None,
        *,
        cut: Sequence[bool] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute advantages float32 [B] and trained bool [B] of the B samples of one step.

        A sample whose reward failed (None or NaN) is left out of all statistics, gets 0 and is not trained.
        ``groups``: the group of each sample.
        ``response_lengths``: in tokens.
        ``reference_kl``: behaviour_logprobs - ref_logprobs of each sample, summed over its response. Only for
            algorithm.kl_in=reward.
        ``cut``: whether the limit ended the response, not an end token; None: of all with max_response_length tokens.
        Raise ValueError: the columns differ in length, or ``reference_kl`` is needed and is or contains None."""
        if not len(rewards) == len(groups) == len(response_lengths):
            raise ValueError(f"{len(rewards)} rewards, {len(groups)} groups, {len(response_lengths)} lengths")
        shaped_B = self.shape_rewards(rewards, response_lengths, reference_kl, cut)
        trained_B = ~np.isnan(shaped_B)
        advantages_B = np.zeros(len(shaped_B))
        groups_n = number_groups([group for group, trained in zip(groups, trained_B.tolist(), strict=True) if trained])
        advantages_B[trained_B] = self.estimate(shaped_B[trained_B], groups_n)
        with np.errstate(over="ignore"):  # of rewards beyond the half of float32: the trainer skips such an update
            return torch.from_numpy(advantages_B.astype(np.float32)), torch.from_numpy(trained_B)

    def shape_rewards(
        self,
        rewards: Sequence[Reward],
        response_lengths: Sequence[int],
        reference_kl: Sequence[float] | None = None,
        cut: Sequence[bool] | None = None,
    ) -> FloatArray:
        """Add the penalty on overlong responses; with `kl_in=reward`, subtract `kl_coef` times the KL. Returns float64
        [B], NaN where the reward failed."""
        config, longest = self.config, self.max_response_length
        buffer = config.overlong_buffer
        if buffer is None:
            buffer = int(self.overlong_share * longest)
        rewards_B = np.array(rewards, dtype=np.float64)  # None becomes NaN
        lengths_B = np.array(response_lengths, dtype=np.int64)
        cut_B = lengths_B >= longest if cut is None else np.array(cut, dtype=np.bool_)
        shaped_B = rewards_B + overlong_penalty(lengths_B, longest, buffer, cut_B)
        if config.kl_in != "reward" or not config.kl_coef:
            return shaped_B
        if reference_kl is None:
            raise ValueError("algorithm.kl_in=reward needs each sample's reference_kl to compute advantages")
        if len(reference_kl) != len(rewards):
            raise ValueError(
                f"reference_kl has {len(reference_kl)} samples; expected {len(rewards)}, as many as rewards"
            )
        if None in reference_kl:
            raise ValueError("reference_kl has a None; expected a number for each sample")
        # The log-ratio, summed over a response, estimates the KL (InstructGPT, arXiv 2203.02155, section 3.5, eq. 2).
        return shaped_B - config.kl_coef * np.array(reference_kl, dtype=np.float64)

    def estimate(self, rewards_n: FloatArray, groups_n: IntArray) -> FloatArray:
        """Return the advantages [n] of the samples whose rewards did not fail, from their shaped rewards. ``groups_n``:
        the number of each sample's group, from 0."""
        raise NotImplementedError

    def weigh(self, sequences: Sequences) -> Sequences:
        """Return the sequences with the columns `token_weight` and `normaliser`, by which the loss is averaged."""
        return weigh(sequences, self.config.loss_aggregation or self.aggregation, self.max_response_length)

    def log_ratio(self, tokens: LossInput, anchor_n: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the ratio to be clipped, [n] with gradient: the policy's probability over that of
        ``anchor_n``, which are log-probabilities."""
        return log_ratio(tokens.logprobs, anchor_n)

    def loss(self, tokens: LossInput) -> LossOutput:
        """Compute the loss and the metrics of each token. Raise ValueError: a required column is missing (named)."""
        config = self.config
        advantages = tokens.needed("advantages", f"algorithm.name={self.name}")
        behaviour = tokens.needed("behaviour_logprobs", f"algorithm.correction={config.corrects_by}")
        anchor, weight, metrics = self.correct(tokens)
        log_r = self.log_ratio(tokens, anchor)
        clipped = clipped_loss(log_r, advantages, low=config.clip_low, high=config.clip_high)
        loss = clipped.loss if weight is None else clipped.loss * weight
        metrics = metrics | {
            "actor/pg_loss": loss.detach(),
            "actor/pg_clipfrac": clipped.clipped.to(torch.float32),
            "actor/ratio_mean": log_r.detach().exp(),
            "actor/ppo_kl": -log_ratio(tokens.logprobs.detach(), behaviour),
        }
        if config.kl_in == "loss" and (config.kl_coef or tokens.ref_logprobs is not None):
            reference = tokens.needed("ref_logprobs", f"algorithm.kl_coef={config.kl_coef}")
            kl = k3_divergence(tokens.logprobs, reference)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + config.kl_coef * kl
        return LossOutput(loss, metrics)


def overlong_penalty(lengths_B: IntArray, longest: int, buffer: int, cut_B: NDArray[np.bool_]) -> FloatArray:
    """Return 0 up to ``longest`` - ``buffer`` tokens, then decrease linearly to -1 at ``longest`` for responses that
    were cut there. One that has ended with its last token had no need of more: it counts as one token shorter.

    Soft overlong punishment (DAPO, arXiv 2503.14476, section 3.4: L_max is ``longest``, L_cache is ``buffer``)."""
    if not buffer:
        return np.zeros(len(lengths_B))
    lengths_B = np.where(cut_B, lengths_B, np.minimum(lengths_B, longest - 1))
    return -np.clip((lengths_B - (longest - buffer)) / buffer, 0.0, 1.0)


def failed(reward: Reward) -> bool:
    return reward is None or math.isnan(reward)
