"""Limits of a setup are those of the config groups."""

from __future__ import annotations

from dataclasses import asdict

from fusion.costmodel.setup import EngineLimits, TrainingLimits
from fusion.inference.config import RolloutConfig
from fusion.training.config import TrainingConfig


def test_defaults_are_those_of_the_config_groups():
    """But for recomputation, without which no large model fits."""
    rollout, training = asdict(RolloutConfig().engine), asdict(TrainingConfig(recompute=True))
    assert asdict(EngineLimits()) == {key: rollout[key] for key in asdict(EngineLimits())}
    assert asdict(TrainingLimits()) == {key: training[key] for key in asdict(TrainingLimits())}
