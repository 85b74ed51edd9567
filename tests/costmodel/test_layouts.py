"""Layouts as text."""

from pathlib import Path

import pytest

from fusion.costmodel.layouts import layout_text, parse_layout
from fusion.costmodel.presets import load_shape
from fusion.model import Parallel

SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"


@pytest.fixture(scope="module")
def qwen():
    return load_shape("qwen3_30b_a3b", SHAPES).shape


@pytest.mark.parametrize("text", ["tp1ep1", "tp8pp16ep4", "tp2ep8etp2", "tp4ep128"])
def test_round_trip(text):
    pangu = load_shape("pangu_718b", SHAPES).shape
    assert layout_text(parse_layout("train", text, world=2048, shape=pangu)) == text


def test_order_and_what_is_left_out(qwen):
    assert parse_layout("infer", "ep8tp2", world=16, shape=qwen) == Parallel(16, tp=2, ep=8)
    assert parse_layout("infer", "pp4", world=16, shape=qwen) == Parallel(16, pp=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "train='': expected sizes of tp, pp, ep and etp"),
        ("tp8cp4", "train='tp8cp4': cp=4 does not divide the 2 data-parallel ranks: expected one of 1, 2"),
        ("tp8xx", "train='tp8xx': expected .* like tp8pp8ep32"),
        ("tp2tp4", "train='tp2tp4' states tp twice"),
        ("tp3", "train='tp3': tp=3 does not divide the 16 ranks"),
        ("ep3", "ep=3 does not divide"),
        ("pp16tp2", "tp=2 does not divide the 1 ranks of a stage"),
        ("etp0", "etp=0: expected at least 1"),
    ],
)
def test_refusals_name_key_and_form(qwen, text, message):
    with pytest.raises(ValueError, match=message):
        parse_layout("train", text, world=16, shape=qwen)


def test_what_the_model_does_not_divide(qwen):
    for text, message in [
        ("ep256", "ep=256 does not divide the model's num_experts=128"),
        ("pp64", "pp=64 exceeds the model's num_hidden_layers=48"),
        ("tp64", "tp=64 does not divide the model's num_attention_heads=32"),
    ]:
        with pytest.raises(ValueError, match=f"train='{text}': {message}"):
            parse_layout("train", text, world=256, shape=qwen)


def test_only_training_has_context_parallelism(qwen):
    assert parse_layout("train", "tp2cp4", world=16, shape=qwen) == Parallel(16, tp=2, cp=4)
    assert layout_text(Parallel(16, tp=2, cp=4)) == "tp2ep1cp4"
    for text in ("cp2", "cp3"):
        with pytest.raises(ValueError, match=f"infer='{text}': expected cp=1, as only train has it"):
            parse_layout("infer", text, world=16, shape=qwen)


def test_only_generation_has_decode_context_parallelism(qwen):
    assert parse_layout("infer", "tp16dcp4", world=16, shape=qwen) == Parallel(16, tp=16, dcp=4)
    assert layout_text(Parallel(16, tp=16, dcp=4)) == "tp16ep1dcp4"
    for text, message in [
        ("tp4dcp8", "dcp=8 does not divide tp=4: expected one of 1, 2, 4"),
        ("tp4dcp2", r"dcp=2: with tp=4 the same keys and values are on 1 of the ranks, .* expected one of 1"),
    ]:
        with pytest.raises(ValueError, match=f"infer='{text}': {message}"):
            parse_layout("infer", text, world=16, shape=qwen)
    for text in ("tp16dcp4", "dcp3"):
        with pytest.raises(ValueError, match=f"train='{text}': expected dcp=1, as only infer has it"):
            parse_layout("train", text, world=16, shape=qwen)
