"""The config groups `training` and `algorithm`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

SCHEDULES = ("constant", "cosine")
KL_IN = ("loss", "reward")

REPLAYS = ("none", "train", "rollout")


@dataclass
class TrainingConfig:
    """How a step of the optimizer is made. `validate()` raises `ValueError` naming the key."""

    lr: float = 1e-6
    """Peak learning rate of AdamW."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of AdamW's first and second moment."""

    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; norms have none."""

    clip_grad: float = 1.0
    """Greatest norm of the whole gradient; a longer one is scaled down to it. 0: no clipping."""

    schedule: str = "constant"
    """Learning rate after the warm-up: `constant`, or `cosine` down to 0 at the last step of the run."""

    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0 to `lr`."""

    token_budget: int = 16384
    """Tokens of one micro-batch on one data-parallel rank: bounds the memory of activations, changes no result."""

    recompute: bool = False
    """Keep only the input of each layer and compute the rest again in the backward pass: less memory, about a third
    more work."""

    load_balancing_coef: float | None = None
    """Weight of the experts' load-balancing loss; null: the model's own `router_aux_loss_coef`; 0: none."""

    def validate(self) -> None:
        _number("training.lr", self.lr, 0.0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"training.betas={list(self.betas)}: expected two numbers in [0, 1)")
        _number("training.weight_decay", self.weight_decay, 0.0)
        _number("training.clip_grad", self.clip_grad, 0.0)
        _one_of("training.schedule", self.schedule, SCHEDULES)
        _whole("training.warmup_steps", self.warmup_steps, 0)
        _whole("training.token_budget", self.token_budget, 1)
        if self.load_balancing_coef is not None:
            _number("training.load_balancing_coef", self.load_balancing_coef, 0.0)


@dataclass
class AlgorithmConfig:
    """What a sample's reward does to the policy. `validate()` raises `ValueError` naming the key."""

    name: str = "grpo"
    """Algorithm: one of the files of `fusion/training/algorithms` (grpo, dr_grpo, dapo, gspo, rloo,
    reinforce_plus_plus)."""

    group_size: int = 8
    """Responses sampled of each prompt; their rewards are compared with each other."""

    clip_low: float = 0.2
    """The probability ratio of a token (gspo: of a sequence) is clipped at 1 - clip_low."""

    clip_high: float = 0.2
    """The probability ratio of a token (gspo: of a sequence) is clipped at 1 + clip_high."""

    kl_coef: float = 0.0
    """Weight of the KL divergence to the reference model; 0: no reference model is needed."""

    kl_in: str = "loss"
    """Where that divergence goes: `loss`, each token's estimate; `reward`, that of a sample's whole response is
    subtracted from its reward."""

    normalize_advantages: bool = True
    """Divide a group's advantages by the standard deviation of its rewards (grpo, dapo, gspo; the others' formulas have
    no such choice); false: only subtract the mean."""

    loss_aggregation: str | None = None
    """How tokens' losses are averaged: `token_mean`, over all tokens of the batch; `sequence_mean`, over each sequence,
    then over sequences; `constant`, summed, divided by sequences x rollout.max_response_length; null: the algorithm's
    own (dr_grpo, rloo: constant; gspo: sequence_mean; others: token_mean)."""

    overlong_buffer: int | None = None
    """Tokens before rollout.max_response_length over which a response's reward falls by up to 1; 0: none; null: the
    algorithm's own (dapo: a fifth of the maximum; others: none)."""

    correction: str | None = None
    """What is done about samples of another policy than the one trained (`fusion/training/corrections.py`): `none`,
    `tis_token`, `tis_sequence`, `decoupled`, `icepop` or `mask_sequence`; null: `none`, or `decoupled` where
    stalesync.max_staleness > 0, which with several minibatches costs a forward pass of the batch."""

    correction_cap: float | None = None
    """The correction's greatest importance weight (mask_sequence: a sequence's geometric mean of ratios lies between
    its inverse and it); null: its own (tis_token, tis_sequence and mask_sequence 2, decoupled and icepop 5)."""

    correction_floor: float | None = None
    """Tokens (icepop) or whole sequences with a token (mask_sequence) of a smaller ratio are left out; null: the
    correction's own (icepop 0.5, mask_sequence 0.0001)."""

    minibatches: int = 1
    """Optimizer steps the samples of one loop step are divided into."""

    replay: str = "none"
    """Routing of experts that every forward pass of a step repeats: `rollout`, the engine's (R3, arXiv 2510.11370);
    `train`, the trainer's own of before the step's first update (R2, arXiv 2507.18071); `none`. With either,
    `training/routing_mismatch` is the share of (token, layer)s that the router would now have sent elsewhere."""

    @property
    def corrects_by(self) -> str:
        """`correction`, with `none` for null."""
        return self.correction or "none"

    def validate(self) -> None:
        from fusion.training.algorithms import ALGORITHMS
        from fusion.training.algorithms.aggregation import AGGREGATIONS
        from fusion.training.corrections import CORRECTIONS

        _one_of("algorithm.name", self.name, ALGORITHMS)
        _one_of("algorithm.kl_in", self.kl_in, KL_IN)
        if self.correction is not None:
            _one_of("algorithm.correction", self.correction, [*CORRECTIONS, "null"])
        if self.loss_aggregation is not None:
            _one_of("algorithm.loss_aggregation", self.loss_aggregation, [*AGGREGATIONS, "null"])
        _whole("algorithm.group_size", self.group_size, 2 if self.name == "rloo" else 1)
        _number("algorithm.clip_low", self.clip_low, 0.0)
        _number("algorithm.clip_high", self.clip_high, 0.0)
        if self.clip_low >= 1:
            raise ValueError(f"algorithm.clip_low={self.clip_low}: expected a number in [0, 1)")
        _number("algorithm.kl_coef", self.kl_coef, 0.0)
        _whole("algorithm.minibatches", self.minibatches, 1)
        if self.overlong_buffer is not None:
            _whole("algorithm.overlong_buffer", self.overlong_buffer, 0)
        _one_of("algorithm.replay", self.replay, REPLAYS)
        self._check_correction()

    def _check_correction(self) -> None:
        from fusion.training.corrections import USE_CAP, USE_FLOOR

        for key, uses in (("correction_cap", USE_CAP), ("correction_floor", USE_FLOOR)):
            value = getattr(self, key)
            if value is None:
                continue
            _number(f"algorithm.{key}", value, 1.0 if key == "correction_cap" else 0.0)
            if self.corrects_by not in uses:
                raise ValueError(
                    f"algorithm.{key}={value} has no use in algorithm.correction={self.corrects_by}: expected null, or "
                    f"one of the corrections {', '.join(uses)}"
                )
        if self.correction_floor is not None and self.correction_floor > 1:
            raise ValueError(f"algorithm.correction_floor={self.correction_floor}: expected a number in [0, 1]")


def _one_of(key: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value!r}: expected one of {', '.join(choices)}")


def _number(key: str, value: Any, least: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= least):
        raise ValueError(f"{key}={value!r}: expected a number of at least {least:g}")


def _whole(key: str, value: Any, least: int) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        raise ValueError(f"{key}={value!r}: expected a whole number of at least {least}")
