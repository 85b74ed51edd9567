"""What a plan counts of adapters is what the parameter table holds of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion.costmodel import search
from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.memory import WEIGHT_BYTES, estimate_memory, moved_share, stage_weights, trained_weights
from fusion.costmodel.presets import load_shape
from fusion.costmodel.search import estimate
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.model import Parallel
from fusion.model.adapters import Adapters
from fusion.model.table import local_params
from fusion.resources import RECIPES
from tests.helpers import tiny_config

SHAPES = RECIPES / "shapes"
LAYOUTS = [Parallel(4, tp=2, ep=4), Parallel(4, tp=2, pp=2, ep=2), Parallel(8, tp=4, ep=2)]


@pytest.mark.parametrize("targets", [("attention", "mlp", "experts"), ("experts",), ("attention",)])
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_trained_elements_are_those_of_the_table(parallel, targets):
    config, adapters = tiny_config(num_hidden_layers=3, mlp_only_layers=[1]), Adapters(4, 8.0, targets)
    shape = Shape("tiny", config, adapters)
    for rank in range(parallel.world):
        table = local_params(replace(config, adapters=adapters), parallel, rank)
        trained = trained_weights(shape, parallel, parallel.coordinate("pp", rank))
        assert trained.dense == sum(row.numel for row in table if row.trained and not row.expert)
        assert trained.expert == sum(row.numel for row in table if row.trained and row.expert)


def test_718b_with_adapters_needs_a_fraction_of_the_cards():
    shape, layout = load_shape("pangu_718b", SHAPES).shape, Parallel(32, tp=8, ep=32)
    setup = Setup(replace(shape, adapters=Adapters(16, 32.0)), hardware_named("ascend_910c"), layout, layout)
    sizes, full = (estimate_memory(replace(setup, shape=one)) for one in (setup.shape, shape))
    assert not [problem for problem in estimate(setup).problems if "HBM" in problem]
    assert sizes.total("train") < 0.2 * full.total("train")
    assert sizes.phases["train"]["weights"] == pytest.approx(full.phases["train"]["weights"], rel=0.02)
    assert sizes.phases["train"]["weights"] > WEIGHT_BYTES * stage_weights(shape, layout, 0).numel


def test_cards_that_only_generate_receive_adapters_alone():
    shape, side = load_shape("qwen3_30b_a3b", SHAPES).shape, Parallel(8, ep=8)
    adapted = replace(shape, adapters=Adapters(16, 32.0))
    setup = Setup(adapted, hardware_named("ascend_910c"), side, side, infer_first=8)
    share = moved_share(setup)
    assert 0 < share < 0.05
    there, full = (estimate(replace(setup, shape=one)).moved[0].total for one in (adapted, shape))
    assert there == pytest.approx(share * full)
    assert moved_share(replace(setup, infer_first=0)) == 1.0, "the base of shared cards is resharded"


@pytest.mark.parametrize("adapters", [Adapters(16, 32.0), None])
def test_equal_layouts_are_compared_with_the_best_pairs_where_a_switch_then_moves_nothing(adapters):
    shape, side = load_shape("qwen3_30b_a3b", SHAPES).shape, Parallel(8, ep=8)
    pairs = search.rank(Setup(replace(shape, adapters=adapters), hardware_named("ascend_910c"), side, side)).pairs
    equal = [pair for pair in pairs if pair.setup.train == pair.setup.infer]
    assert bool(equal) == bool(adapters)
    assert not any(pair.moved[0].total for pair in equal)
    assert all(pair.moved[0].total for pair in pairs if pair not in equal)
