"""Switches are planned between the layouts of the weights, whatever shares the samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusion.colocate.weights.route import ends_of_route, plan_route
from fusion.model import ModelConfig
from tests.colocate.cards import make_spec
from tests.helpers import tiny_checkpoint


@pytest.mark.parametrize("deployment", ["colocated", "separate", "hybrid"])
@pytest.mark.parametrize("train", [{"tp": 2, "ep": 2}, {"ep": 4}, {"pp": 2}], ids=str)
def test_context_parallelism_changes_no_plan(tmp_path: Any, deployment: str, train: dict[str, int]) -> None:
    path = tiny_checkpoint(tmp_path)
    spec = make_spec(path, 4 if deployment == "colocated" else 8, train, {"tp": 2, "ep": 2}, deployment=deployment)
    config, engines = ModelConfig.from_hf(path), range(len(spec.engines))
    assert spec.train.dp > 1
    shared = replace(spec, train=replace(spec.train, cp=spec.train.dp))
    plans = [plan_route(one, ends_of_route(one, config, engines)) for one in (shared, spec)]
    assert plans[0] == plans[1]
