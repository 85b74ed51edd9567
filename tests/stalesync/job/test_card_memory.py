"""What does not fit the cards of a job is refused, with the keys to change, before anything starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from fusion.costmodel.presets import load_shape
from stalesync.job.config import Config
from stalesync.job.workload import estimate
from tests.stalesync.job.jobs import job_of

SHAPES = Path(__file__).resolve().parents[3] / "recipes" / "shapes"
QWEN3 = load_shape("qwen3_30b_a3b", SHAPES).shape.config


def eight_h100(**changes: Any) -> Config:
    settings = dict(
        device__kind="cuda",
        cluster__hardware="h100",
        cluster__npus=8,
        parallel__train__ep=8,
        parallel__infer__ep=8,
        model__dtype="bfloat16",
        training__recompute=True,
        data__prompts_per_step=64,
        rollout__max_response_length=1024,
    )
    return job_of("qwen3_30b_a3b", **(settings | changes))


def test_a_job_that_does_not_fit_is_refused_with_the_key_that_makes_it_fit() -> None:
    with pytest.raises(
        ValueError, match=r"^fusion\.offload=switch .*: train takes .*; it fits with fusion\.offload=stream$"
    ):
        estimate(eight_h100(), QWEN3)
    setup, sizes = estimate(eight_h100(fusion__offload="stream"), QWEN3)
    assert sizes.total("train") < setup.hardware.usable_bytes


@pytest.mark.parametrize("changes", [{"model__dtype": "float32"}, {"cluster__hardware": None}], ids=str)
def test_a_job_of_which_the_estimate_is_not_sure_is_warned_of(changes: dict, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        estimate(eight_h100(**changes), QWEN3)
    assert any(record.getMessage().startswith("memory: train takes") for record in caplog.records)
