"""Shapes agree with the parameter table of what we train, and with what is published of what we cannot train yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.costmodel import Shape, boxes
from fusion.costmodel.presets import load_shape
from fusion.model import Parallel, local_params
from tests.helpers import tiny_config

SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
NAMES = sorted(path.stem for path in SHAPES.glob("*.yaml"))
TINY = [
    tiny_config(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, moe_intermediate_size=32),
    tiny_config(num_hidden_layers=3, num_key_value_heads=4, tie_word_embeddings=False),
    tiny_config(experts=False, num_hidden_layers=4, num_attention_heads=8),
]


@st.composite
def layouts(draw, config) -> Parallel:
    sizes = st.sampled_from([1, 2, 4, 8])
    while True:
        tp, pp, ep, etp = (draw(sizes) for _ in range(4))
        try:
            parallel = Parallel(draw(st.sampled_from([1, 2, 4, 8, 16])), tp, ep, pp, etp)
            parallel.check(config, "parallel")
        except ValueError:
            continue
        return parallel


@settings(max_examples=25)
@given(st.data())
def test_boxes_are_those_of_the_parameter_table(data):
    config = data.draw(st.sampled_from(TINY))
    parallel = data.draw(layouts(config))
    shape = Shape.from_config("tiny", config)
    for rank in range(parallel.world):
        table = [(part.name, part.region) for param in local_params(config, parallel, rank) for part in param.parts]
        assert sorted(boxes(shape, parallel, rank)) == sorted(table)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "qwen3_235b_a22b"])
def test_boxes_of_the_real_models(name):
    shape = load_shape(name, SHAPES).shape
    assert shape.config is not None
    parallel = Parallel(64, tp=8, ep=8, pp=2, etp=2)
    for rank in (0, 13, 40, 63):
        table = [(p.name, p.region) for param in local_params(shape.config, parallel, rank) for p in param.parts]
        assert sorted(boxes(shape, parallel, rank)) == sorted(table)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_published(name):
    published = yaml.safe_load((SHAPES / f"{name}.yaml").read_text())["published"]
    shape = load_shape(name, SHAPES).shape
    assert shape.numel == pytest.approx(published["parameters"], rel=0.003)
    assert shape.active == pytest.approx(published["active"], rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_a_grid_holds_every_element_once_but_for_replicas(name):
    shape = load_shape(name, SHAPES).shape
    parallel = Parallel(128, tp=2, ep=16, pp=4)
    first_replica = [r for r in range(128) if parallel.coordinate("dp", r) == 0 or parallel.coordinate("edp", r) == 0]
    held: dict[tuple, int] = {}
    for rank in first_replica:
        for name_, box in boxes(shape, parallel, rank):
            size = 1
            for start, stop in box:
                size *= stop - start
            held[name_, box] = size
    assert sum(held.values()) == shape.numel


def test_latent_attention_keeps_one_cache_for_all_heads():
    pangu, qwen = (load_shape(name, SHAPES).shape for name in ("pangu_718b", "qwen3_30b_a3b"))
    assert pangu.kv_bytes(tp=1) == pangu.kv_bytes(tp=8) == 61 * (512 + 64) * 2
    assert qwen.kv_bytes(tp=1) == 48 * 2 * 4 * 128 * 2 == 4 * qwen.kv_bytes(tp=4) == 4 * qwen.kv_bytes(tp=8)
    assert qwen.kv_bytes(tp=1, pp=2) == qwen.kv_bytes(tp=1) // 2


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"model_type": "llama"}, "model=x: .*'llama' is not supported.*deepseek_v3.*can be planned for"),
        ({"model_type": "deepseek_v3", "hidden_size": 8}, "model=x: its config lacks 'num_attention_heads'"),
    ],
)
def test_what_cannot_be_planned_for_is_named(hf, message):
    with pytest.raises(ValueError, match=message):
        Shape.from_hf("x", hf)
