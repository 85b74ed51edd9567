"""Correct the policy loss for tokens that another policy sampled than the one being trained: an older one, or the same
one in an engine whose kernels round differently.

    behaviour: sampled the tokens;  proximal: the trainer's policy at the start of the step;  current: is being trained

                     ratio that is clipped      weight of a token's loss
    none             current / behaviour        1
    tis_token        1, with its gradient       min(cap, current / behaviour)
    tis_sequence     1, with its gradient       min(cap, current / behaviour of the whole sequence)
    decoupled        current / proximal         min(cap, proximal / behaviour)
    icepop           1, with its gradient       current / behaviour, 0 outside [floor, cap]
    mask_sequence    current / behaviour        1, 0 in a sequence that is masked

Invariants, for floor <= 1 <= cap: a weight carries no gradient and is in [0, cap]; where current, proximal and
behaviour agree the weight is 1 and all corrections give the same loss with the same gradient; a masked token adds
nothing to the policy loss but still counts in the average, so that masking does not raise the weight of the others."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from fusion.npu import to_card
from fusion.telemetry.classes import find
from fusion.training.config import CORRECTIONS, AlgorithmConfig
from fusion.training.loss import LossInput, log_ratio, means_of_sequences, sums_of_sequences
from fusion.training.segments import owners

WEIGHT = "rollout_corr/rollout_is_mean"
TRUNCATED = "rollout_corr/rollout_is_ratio_fraction_high"
MASKED = "rollout_corr/rollout_rs_masked_fraction"


class Corrected(NamedTuple):
    """The correction of each token [n], detached: the log-probability in the ratio's denominator, the weight of the
    token's loss (None: 1), and values to be averaged by metric name."""

    anchor: torch.Tensor
    weight: torch.Tensor | None
    metrics: dict[str, torch.Tensor]


def none(tokens: LossInput) -> Corrected:
    """Apply no correction: plain PPO, which bounds the difference of the policies by the clip (arXiv 1707.06347)."""
    return Corrected(_behaviour(tokens), None, {})


def tis_token(tokens: LossInput, cap: float = 2.0) -> Corrected:
    """Weight each token by its truncated importance ratio (IMPALA, arXiv 1802.01561, section 4.1, the weight ρ; for the
    mismatch of trainer and engine: Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025)."""
    current = tokens.logprobs.detach()
    return _truncated(current, log_ratio(current, _behaviour(tokens)), cap)


def tis_sequence(tokens: LossInput, cap: float = 2.0) -> Corrected:
    """Weight each sequence by its truncated importance ratio, the product over its tokens: unbiased except for the cap,
    with a higher variance (Liu et al., "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch", 2025)."""
    current = tokens.logprobs.detach()
    log_w = sums_of_sequences(log_ratio(current, _behaviour(tokens)), tokens.lengths)
    return _truncated(current, log_ratio(log_w, torch.zeros_like(log_w)), cap)


def decoupled(tokens: LossInput, cap: float = 5.0) -> Corrected:
    """Apply decoupled PPO: clip around the proximal policy, weight by the importance ratio of proximal and behaviour
    policy (Hilton et al., arXiv 2110.00641, section 3; for stale rollouts AReaL, arXiv 2505.24298, section 5.2). The
    cap is that of truncated importance sampling."""
    proximal = tokens.logprobs.detach() if tokens.proximal_logprobs is None else tokens.proximal_logprobs
    return _truncated(proximal, log_ratio(proximal, _behaviour(tokens)), cap)


def icepop(tokens: LossInput, floor: float = 0.5, cap: float = 5.0) -> Corrected:
    """Mask tokens whose importance ratio is outside [floor, cap], instead of truncating the ratio (IcePop; Ring-1T,
    arXiv 2510.18855)."""
    current = tokens.logprobs.detach()
    ratio = log_ratio(current, _behaviour(tokens)).exp()
    kept = (ratio >= floor) & (ratio <= cap)
    weight = ratio * kept
    return Corrected(current, weight, {WEIGHT: weight, MASKED: (~kept).to(torch.float32)})


def mask_sequence(tokens: LossInput, floor: float = 1e-4, cap: float = 2.0) -> Corrected:
    """Mask whole sequences if the geometric mean of their tokens' ratios is outside [1 / cap, cap], or their smallest
    ratio is below floor (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, off-policy sequence masking, here on both sides
    and for any advantage; the bound on the smallest ratio is verl's veto)."""
    behaviour = _behaviour(tokens)
    log_r = log_ratio(tokens.logprobs.detach(), behaviour)
    owner = to_card(owners(tokens.lengths), log_r.device)
    smallest = log_r.new_full((len(tokens.lengths),), torch.inf).scatter_reduce(0, owner, log_r, "amin")[owner]
    mean = means_of_sequences(log_r, tokens.lengths)
    kept = (smallest.exp() >= floor) & (mean.abs() <= math.log(cap))
    return Corrected(behaviour, kept.to(torch.float32), {MASKED: (~kept).to(torch.float32)})


def make_correction(config: AlgorithmConfig) -> Callable[[LossInput], Corrected]:
    """Return the configured correction with its bounds; the defaults of these are those of its source."""
    correct = find(config.corrects_by, CORRECTIONS, key=f"algorithm.correction={config.corrects_by}")
    stated = {"floor": config.correction_floor, "cap": config.correction_cap}
    return partial(correct, **{name: bound for name, bound in stated.items() if bound is not None})


def _behaviour(tokens: LossInput) -> torch.Tensor:
    return tokens.needed("behaviour_logprobs", "a correction")


def _truncated(anchor: torch.Tensor, log_w: torch.Tensor, cap: float) -> Corrected:
    ratio = log_w.exp()
    weight = ratio.clamp(max=cap)
    return Corrected(anchor, weight, {WEIGHT: weight, TRUNCATED: (ratio > cap).to(torch.float32)})
