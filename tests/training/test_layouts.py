"""One checkpoint and one batch: every layout computes the same loss, the same gradient norm and the same policy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.helpers import run_ranks, tiny_checkpoint
from tests.training.ranks import LAYOUTS, Case, train

SETTINGS = {
    "moe": {"training": {"load_balancing_coef": 0.0}},
    "moe-balanced": {"training": {"load_balancing_coef": 0.05, "clip_grad": 1.0}},
    "moe-balanced-micro-batches": {"training": {"load_balancing_coef": 0.05, "token_budget": 25, "recompute": True}},
    "moe-untied-small-buckets": {"training": {"load_balancing_coef": 0.05, "token_budget": 60}, "bucket_bytes": 20000},
    "dense-micro-batches": {"training": {"token_budget": 30}, "bucket_bytes": 20000},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "moe": tiny_checkpoint(folder / "moe"),
        "moe-untied": tiny_checkpoint(folder / "untied", tie_word_embeddings=False),
        "dense": tiny_checkpoint(folder / "dense", experts=False),
    }


def run(checkpoints: dict[str, str], setting: str, world: int, tp: int, ep: int) -> list[dict[str, Any]]:
    kind = "dense" if setting.startswith("dense") else "moe-untied" if "untied" in setting else "moe"
    return run_ranks(train, world, world, Case(checkpoints[kind], tp, ep, steps=3, **SETTINGS[setting]))


_single = lru_cache(maxsize=None)(lambda setting, folders: run(dict(folders), setting, 1, 1, 1)[0])


@pytest.mark.parametrize(
    ("setting", "layout"),
    [(s, layout) for s in SETTINGS for layout in LAYOUTS[1:] if layout[2] == 1 or not s.startswith("dense")],
    ids=lambda value: value if isinstance(value, str) else "world{}-tp{}-ep{}".format(*value),
)
def test_a_layout_trains_as_one_rank_does(checkpoints, setting, layout):
    wanted = _single(setting, tuple(checkpoints.items()))
    results = run(checkpoints, setting, *layout)
    for step, metrics in enumerate(results[0]["steps"]):
        assert metrics == pytest.approx(wanted["steps"][step], rel=1e-5, abs=1e-7)
    assert all(result["steps"] == results[0]["steps"] for result in results)
    weights = results[0]["weights"]
    assert weights.keys() == wanted["weights"].keys()
    for name, tensor in wanted["weights"].items():
        torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
