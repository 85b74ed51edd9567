"""Corrections of the policy loss where another policy sampled than the one that is trained: older, or in an engine
whose kernels round otherwise.

    behaviour  sampled the tokens;  proximal  the trainer's policy as the step began;  current  what is trained

                     ratio that is clipped      weight of a token's loss
    none             current / behaviour        1
    tis_token        1, with its gradient       min(cap, current / behaviour)
    tis_sequence     1, with its gradient       min(cap, current / behaviour of the whole sequence)
    decoupled        current / proximal         min(cap, proximal / behaviour)
    icepop           1, with its gradient       current / behaviour, 0 outside [floor, cap]
    mask_sequence    current / behaviour        1, 0 in a sequence that is left out

Invariants, for floor <= 1 <= cap: a weight carries no gradient and lies in [0, cap]; where current, proximal and
behaviour agree it is 1 and all corrections are the same loss with the same gradient; a masked token adds nothing to the
policy loss and keeps its place in the average, so that masking does not make others count more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from fusion.training.config import AlgorithmConfig
from fusion.training.loss import LossInput, log_ratio, means_of_sequences, owners, sums_of_sequences

WEIGHT = "rollout_corr/rollout_is_mean"
TRUNCATED = "rollout_corr/rollout_is_ratio_fraction_high"
MASKED = "rollout_corr/rollout_rs_masked_fraction"


class Band(NamedTuple):
    floor: float
    cap: float


class Corrected(NamedTuple):
    """Of each token [n], detached: the log-probability that the ratio is taken against, what its loss is multiplied
    with (None: 1), and figures by metric name."""

    anchor: torch.Tensor
    weight: torch.Tensor | None
    metrics: dict[str, torch.Tensor]


Correct = Callable[[LossInput, Band], Corrected]


def none(tokens: LossInput, band: Band) -> Corrected:
    """PPO as it is: the clip alone stands between the policies (arXiv 1707.06347)."""
    return Corrected(_behaviour(tokens), None, {})


def tis_token(tokens: LossInput, band: Band) -> Corrected:
    """Truncated importance sampling of each token (IMPALA, arXiv 1802.01561, section 4.1, the weight ρ; against an
    engine's mismatch: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025)."""
    current = tokens.logprobs.detach()
    return _truncated(current, log_ratio(current, _behaviour(tokens)), band)


def tis_sequence(tokens: LossInput, band: Band) -> Corrected:
    """The same with one weight a sequence, the product over its tokens: unbiased but for the cap, of more variance (Liu
    et al., "When speed kills stability: demystifying RL collapse from the training-inference mismatch", 2025)."""
    current = tokens.logprobs.detach()
    log_w = sums_of_sequences(log_ratio(current, _behaviour(tokens)), tokens.lengths)
    return _truncated(current, log_ratio(log_w, torch.zeros_like(log_w)), band)


def decoupled(tokens: LossInput, band: Band) -> Corrected:
    """Decoupled PPO: steps stay near the proximal policy, samples are weighted by where they came from (Hilton et al.,
    arXiv 2110.00641, section 3; for stale rollouts AReaL, arXiv 2505.24298, section 5.2). The cap is TIS's."""
    proximal = tokens.logprobs.detach() if tokens.proximal_logprobs is None else tokens.proximal_logprobs
    return _truncated(proximal, log_ratio(proximal, _behaviour(tokens)), band)


def icepop(tokens: LossInput, band: Band) -> Corrected:
    """Tokens on which trainer and engine disagree too much, either way, are left out, not cut to the cap (IcePop;
    Ring-1T, arXiv 2510.18855)."""
    current = tokens.logprobs.detach()
    ratio = log_ratio(current, _behaviour(tokens)).exp()
    kept = (ratio >= band.floor) & (ratio <= band.cap)
    weight = ratio * kept
    return Corrected(current, weight, {WEIGHT: weight, MASKED: (~kept).to(torch.float32)})


def mask_sequence(tokens: LossInput, band: Band) -> Corrected:
    """Sequences are left out whole whose tokens' ratios have a geometric mean outside [1 / cap, cap], or a least one
    below floor (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, off-policy sequence masking, here to both sides and
    whatever the advantage; the least ratio is verl's veto)."""
    behaviour = _behaviour(tokens)
    log_r = log_ratio(tokens.logprobs.detach(), behaviour)
    owner = owners(tokens.lengths, log_r.device)
    least = log_r.new_full((len(tokens.lengths),), torch.inf).scatter_reduce(0, owner, log_r, "amin")[owner]
    mean = means_of_sequences(log_r, tokens.lengths)
    kept = (least.exp() >= band.floor) & (mean.abs() <= math.log(band.cap))
    return Corrected(behaviour, kept.to(torch.float32), {MASKED: (~kept).to(torch.float32)})


CORRECTIONS: dict[str, tuple[Correct, Band]] = {
    "none": (none, Band(0.0, 1.0)),
    "tis_token": (tis_token, Band(0.0, 2.0)),
    "tis_sequence": (tis_sequence, Band(0.0, 2.0)),
    "decoupled": (decoupled, Band(0.0, 5.0)),
    "icepop": (icepop, Band(0.5, 5.0)),
    "mask_sequence": (mask_sequence, Band(1e-4, 2.0)),
}
"""By `algorithm.correction`, with the band of its source where the config does not choose."""


def make_correction(config: AlgorithmConfig) -> Callable[[LossInput], Corrected]:
    correct, band = CORRECTIONS[config.corrects_by]
    floor = band.floor if config.correction_floor is None else config.correction_floor
    cap = band.cap if config.correction_cap is None else config.correction_cap
    return lambda tokens: correct(tokens, Band(floor, cap))


def _behaviour(tokens: LossInput) -> torch.Tensor:
    return tokens.needed("behaviour_logprobs", "a correction")


def _truncated(anchor: torch.Tensor, log_w: torch.Tensor, band: Band) -> Corrected:
    ratio = log_w.exp()
    weight = ratio.clamp(max=band.cap)
    return Corrected(anchor, weight, {WEIGHT: weight, TRUNCATED: (ratio > band.cap).to(torch.float32)})
