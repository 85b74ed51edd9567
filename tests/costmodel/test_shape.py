"""Counts of elements are those of the parameter table, and of what is published of the models."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from math import prod
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.costmodel.memory import stage_weights
from fusion.costmodel.presets import load_shape
from fusion.costmodel.shape import Shape
from fusion.inference.kv_cache import KVCache
from fusion.inference.kv_layout import KVLayout
from fusion.model import ModelConfig, Parallel, global_params, local_params
from fusion.model.local_param import LocalParam
from tests.costmodel.meta_device import meta_card
from tests.families import KINDS, MLA, family_config

SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
NAMES = sorted(path.stem for path in SHAPES.glob("*.yaml"))
LARGE = {"deepseek_r1_671b", "kimi_k2"}
REAL = [pytest.param(name, marks=pytest.mark.extended) if name in LARGE else name for name in NAMES]
WHOLE = Fraction(0), Fraction(1)

Spans = dict[str, tuple[Fraction, Fraction]]
"""Global tensor → the part of the dimension that is cut"""


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


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(st.data())
def test_every_rank_holds_what_the_parameter_table_says(kind, data):
    kv_heads = 8 if kind in MLA else data.draw(st.sampled_from([1, 2, 8]))
    tied = data.draw(st.booleans())
    config = family_config(kind, num_attention_heads=8, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    config = replace(config, num_labels=data.draw(st.sampled_from([0, 0, 2])))
    check_ranks(Shape(kind, config), parallel := data.draw(layouts(config)), ranks=range(parallel.world))


@pytest.mark.parametrize("name", REAL)
def test_every_rank_of_the_real_models_holds_what_the_parameter_table_says(name):
    shape = load_shape(name, SHAPES).shape
    ep = 8 if shape.config.num_experts else 1
    check_ranks(shape, Parallel(64, tp=8, ep=ep, pp=2, etp=min(2, ep)), ranks=(0, 13, 40, 63))


def check_ranks(shape: Shape, parallel: Parallel, ranks) -> None:
    sizes = global_params(shape.config)
    for rank in ranks:
        stage = parallel.layers(shape.config.num_layers, parallel.coordinate("pp", rank))
        of_stage = tuple(f"layers.{layer}." for layer in stage)
        table = tuple(
            param  # every rank also holds the correction biases of other stages' layers
            for param in local_params(shape.config, parallel, rank)
            if param.storage == "unit" or param.name.startswith(of_stage)
        )
        weights = stage_weights(shape, parallel, parallel.coordinate("pp", rank))
        assert weights.dense == sum(param.numel for param in table if not param.expert)
        assert weights.expert == sum(param.numel for param in table if param.expert)
        assert planned_spans(shape, parallel, rank) == held_spans(table, sizes)


def planned_spans(shape: Shape, parallel: Parallel, rank: int) -> Spans:
    """What a rank holds outside the experts, by the shape."""
    stage, tp_rank = parallel.coordinate("pp", rank), parallel.coordinate("tp", rank)
    first, last = stage == 0, stage == parallel.pp - 1
    scopes = [(shape.kind_of[i], str(i)) for i in parallel.layers(shape.config.num_layers, stage)]
    scopes += [("embed", "")] if first or (last and shape.tied) else []
    scopes += [("head", "")] if last else []
    return {
        tensor.name.replace("model.layers.0.", f"model.layers.{layer}."): (Fraction(start, of), Fraction(stop, of))
        for scope, layer in scopes
        for tensor in shape.tensors(scope, parallel.tp)
        for start, stop, of in [tensor.shares[tp_rank]]
    }


def held_spans(table: tuple[LocalParam, ...], sizes: dict[str, tuple[int, ...]]) -> Spans:
    """What a rank holds outside the experts, by its parameter table."""
    spans: Spans = {}
    for part in [part for param in table if not param.expert for part in param.parts]:
        ranges = zip(part.region, sizes[part.name], strict=True)
        cut = [(Fraction(start, size), Fraction(stop, size)) for (start, stop), size in ranges if stop - start < size]
        assert len(cut) <= 1 and part.name not in spans
        spans[part.name] = cut[0] if cut else WHOLE
    return spans


@pytest.mark.parametrize("name", REAL)
def test_the_elements_are_those_of_the_checkpoint(name):
    shape = load_shape(name, SHAPES).shape
    assert shape.numel == sum(map(prod, global_params(shape.config).values()))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_published(name):
    published = yaml.safe_load((SHAPES / f"{name}.yaml").read_text())["published"]
    shape = load_shape(name, SHAPES).shape
    assert shape.numel == pytest.approx(published["parameters"], rel=0.003)
    assert shape.active == pytest.approx(published["active"], rel=0.1)


def test_a_layer_of_hundreds_of_experts_takes_a_few_rows(monkeypatch):
    rows = []

    def counted(*args):
        table = local_params(*args)
        rows.extend(table)
        return table

    monkeypatch.setattr("fusion.costmodel.shape.local_params", counted)
    shape, parallel = load_shape("qwen3_235b_a22b", SHAPES).shape, Parallel(768, tp=8, ep=8, pp=16)
    for _ in range(3):
        for stage in range(parallel.pp):
            stage_weights(shape, parallel, stage)
    assert 0 < len(rows) < 40 * (parallel.tp + 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_token_takes_what_the_engine_allocates_for_it(kind, tp):
    config = family_config(kind, num_attention_heads=8, num_key_value_heads=8 if kind in MLA else 2)
    shape, layers, layout = Shape(kind, config), config.num_layers, KVLayout.of(config.attention, tp)
    with meta_card(1 << 30) as card:
        cache = KVCache(layout, layers=layers, block_size=16, device=card, dtype=torch.bfloat16)
        sizes = []
        for blocks in (1, 4):
            cache.allocate(blocks, max_length=16)
            sizes.append(card.memory_by_owner()["kv"])
            cache.release()
    assert sizes[1] - sizes[0] == 3 * 16 * shape.kv_bytes(tp)
    if kind in MLA:
        assert shape.kv_bytes(tp) == 2 * layers * (config.attention.kv_rank + config.attention.rope_dim)


def test_latent_attention_keeps_one_cache_for_all_heads():
    pangu, qwen = (load_shape(name, SHAPES).shape for name in ("pangu_718b", "qwen3_30b_a3b"))
    assert pangu.kv_bytes(tp=1) == pangu.kv_bytes(tp=8) == 61 * (512 + 64) * 2
    assert qwen.kv_bytes(tp=1) == 48 * 2 * 4 * 128 * 2 == 4 * qwen.kv_bytes(tp=4) == 4 * qwen.kv_bytes(tp=8)
    assert qwen.kv_bytes(tp=1, pp=2) == qwen.kv_bytes(tp=1) // 2


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"model_type": "gpt2"}, "model=.*: model_type 'gpt2' is not supported; expected one of .*'qwen3'"),
        ({"model_type": "qwen3", "vocab_size": 8}, "model=.*config.json lacks hidden_size"),
    ],
)
def test_what_cannot_be_planned_for_is_named(hf, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match=message):
        load_shape(str(tmp_path), SHAPES)


def test_a_hugging_face_folder_is_named_after_itself(tmp_path):
    config = family_config("olmoe")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    shape = load_shape(str(tmp_path), SHAPES).shape
    assert shape.name == tmp_path.name and ModelConfig.from_hf(tmp_path) == shape.config == config
