"""GRPO: a response is judged by the other responses to its prompt (DeepSeekMath, arXiv 2402.03300, section 4.1).

The loss is PPO's clipped ratio against the policy that sampled (arXiv 1707.06347, eq. 7) with separate bounds (DAPO,
arXiv 2503.14476, section 3.1), averaged over tokens, plus KL to a reference model inside the loss.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

from fusion.training.algorithms.loss import Loss, LossInput, LossOutput, k3_divergence, log_ratio
from fusion.training.config import AlgorithmConfig

EPSILON = 1e-6


def group_advantages(
    rewards: Sequence[float | None], groups: Sequence[Hashable], normalize: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and group of B samples → advantages float32 [B] and trained bool [B].

    A reward minus the mean of its group, divided by the group's standard deviation (of a sample: n - 1) if
    ``normalize``. A group whose rewards are all equal gives zeros. A sample whose reward failed (None or NaN) is left
    out of its group's statistics, gets 0 and is not trained.
    """
    members: dict[Hashable, list[int]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward is not None and not math.isnan(reward):
            members.setdefault(group, []).append(index)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    trained = torch.zeros(len(rewards), dtype=torch.bool)
    for indices in members.values():
        values = torch.tensor([rewards[i] for i in indices], dtype=torch.float64)
        trained[indices] = True
        if values.min() == values.max():
            continue
        centred = values - values.mean()
        advantages[indices] = centred / (values.std() + EPSILON) if normalize else centred
    return advantages.to(torch.float32), trained


def make_advantages(config: AlgorithmConfig):
    """`group_advantages` as the config wants it."""
    return lambda rewards, groups: group_advantages(rewards, groups, config.normalize_advantages)


def make_loss(config: AlgorithmConfig) -> Loss:
    """The clipped policy loss with KL to the reference, `kl_coef` times."""

    def loss(tokens: LossInput) -> LossOutput:
        if tokens.advantages is None or tokens.behaviour_logprobs is None:
            raise ValueError("grpo needs the columns advantages and behaviour_logprobs")
        log_r = log_ratio(tokens.logprobs, tokens.behaviour_logprobs)
        ratio = log_r.exp()
        plain = -tokens.advantages * ratio
        clipped = -tokens.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        policy_loss = total = torch.maximum(plain, clipped)
        probs_diff = tokens.logprobs.detach().exp() - tokens.behaviour_logprobs.exp()
        metrics = {
            "actor/pg_loss": policy_loss.detach(),
            "actor/pg_clipfrac": (clipped > plain).to(torch.float32),
            "actor/ppo_kl": -log_r.detach(),
            "training/rollout_probs_diff_mean": probs_diff.abs(),
        }
        if tokens.ref_logprobs is not None:
            kl = k3_divergence(tokens.logprobs, tokens.ref_logprobs)
            metrics["actor/kl_loss"] = kl.detach()
            total = total + config.kl_coef * kl
        elif config.kl_coef:
            raise ValueError(f"algorithm.kl_coef={config.kl_coef} needs the column ref_logprobs")
        return LossOutput(total, metrics)

    return loss
