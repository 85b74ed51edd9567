"""Bytes by owner and phase: what is stored is what the model's own storage says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.memory import copied_latents_bytes, estimate_memory, gathered_bytes, stack_bytes, stage_weights
from fusion.costmodel.presets import load_shape
from fusion.costmodel.search import problems
from fusion.costmodel.setup import EngineLimits, Setup, SwitchLimits, TrainingLimits
from fusion.costmodel.shape import Shape
from fusion.ep_switch.layout import Layout
from fusion.model import Parallel, local_params, plan_units
from tests.helpers import tiny_config

ASCEND_910C = hardware_named("ascend_910c")
SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
PANGU = Setup(load_shape("pangu_718b", SHAPES).shape, ASCEND_910C, Parallel(768, 8, 8, 16), Parallel(768, 8, 256))


@pytest.mark.parametrize("grid", [Parallel(8, 2, 2, 2), Parallel(8, 4, 2, 1, 2), Parallel(4, 1, 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_storage_units(grid, tied):
    config = tiny_config(num_hidden_layers=3, num_attention_heads=8, tie_word_embeddings=tied)
    shape = Shape("tiny", config)
    for rank in range(grid.world):
        params = local_params(config, grid, rank)
        expected = sum(unit.numel for unit in plan_units(params, 2, 1 << 20))
        mine = stage_weights(shape, grid, grid.coordinate("pp", rank))
        assert sum(param.numel for param in params) == mine.numel <= expected
        assert mine.expert == sum(param.numel for param in params if param.expert)


def test_optimizer_of_all_dies_is_twelve_bytes_a_parameter():
    shape, train = PANGU.shape, Parallel(768, 1, 16, 16)
    together = sum(
        stage_weights(shape, train, stage).states_bytes(train) * train.stage_world for stage in range(train.pp)
    )
    assert together == pytest.approx(12 * shape.numel, rel=1e-6)
    assert together / 1e12 == pytest.approx(8.6, rel=0.01), "as published for 718B"


def test_phases_and_owners():
    size = estimate_memory(PANGU)
    train, switch, infer = (size.phases[phase] for phase in ("train", "switch", "infer"))
    assert train["gradients"] == 2 * train["weights"] and not switch["gradients"] and not infer["gradients"]
    assert switch["weights"] == max(train["weights"], infer["weights"]) + stack_bytes(PANGU)
    assert stack_bytes(PANGU) == 2 * 3 * 7680 * 2048 * 256 // 8, "of 32 experts of a training die"
    assert switch["buckets"] == 4 * SwitchLimits().bucket_bytes
    assert switch["optimizer"] == size.states_bytes and not infer["optimizer"]
    usable = ASCEND_910C.usable_bytes
    assert infer["kv"] == pytest.approx(0.9 * (usable - infer["weights"] - infer["activations"]))
    assert size.kv_tokens == int(infer["kv"] // PANGU.shape.kv_bytes(8))


def test_offload_decides_who_holds_the_states():
    sizes = {
        kind: estimate_memory(replace(PANGU, fusion=SwitchLimits(offload=kind)))
        for kind in ("none", "switch", "stream")
    }
    assert sizes["none"].phases["infer"]["optimizer"] == sizes["none"].states_bytes
    assert sizes["none"].kv_tokens < sizes["switch"].kv_tokens == sizes["stream"].kv_tokens
    assert sizes["stream"].phases["train"]["optimizer"] == 4 * SwitchLimits().bucket_bytes
    assert sizes["none"].host_bytes == 0 < sizes["switch"].host_bytes


def test_states_leave_first_where_both_do_not_fit():
    crowded = replace(PANGU, train=Parallel(64, 8, 8, 8), infer=Parallel(64, 1, 64))
    assert not estimate_memory(crowded).overlap and not estimate_memory(crowded).phases["switch"]["optimizer"]


def test_activations_follow_tokens_recompute_and_stages():
    def activations(**changes):
        return estimate_memory(replace(PANGU, **changes)).phases["train"]["activations"]

    base = activations()
    assert activations(training=TrainingLimits(recompute=True, token_budget=32768)) == pytest.approx(2 * base)
    assert activations(training=TrainingLimits(recompute=False)) > 3 * base
    assert activations(train=Parallel(768, 4, 8, 16)) > 1.5 * base


def test_latents_that_cuda_cards_gather_from_their_blocks():
    deepseek = replace(PANGU, shape=load_shape("deepseek_r1_671b", SHAPES).shape)
    deepseek = replace(deepseek, rollout=replace(PANGU.rollout, max_seqs=512))
    on_card = replace(deepseek, hardware=hardware_named("h100"))
    found = [estimate_memory(setup).phases["infer"]["activations"] for setup in (deepseek, on_card)]
    assert found[1] - found[0] == 2 * (512 + 64) * (1 << 20), "bf16, of as many tokens as are gathered at a time"
    short = replace(on_card, rollout=replace(on_card.rollout, max_seqs=1))
    assert gathered_bytes(short) == 2 * (512 + 64) * (78 + 3072), "the longest sequence alone"
    assert gathered_bytes(replace(on_card, shape=load_shape("qwen3_30b_a3b", SHAPES).shape)) == 0


def test_copies_of_latent_attentions_weights_leave_less_for_the_kv_cache():
    deepseek = replace(PANGU, shape=load_shape("deepseek_r1_671b", SHAPES).shape, infer=Parallel(768, 8, 256))
    plain, copied = (
        estimate_memory(setup).phases["infer"] for setup in (deepseek, replace(deepseek, copies_latents=True))
    )
    extra = 2 * 61 * 128 // 8 * (128 + 128) * 512
    assert copied["weights"] - plain["weights"] == extra
    assert plain["kv"] - copied["kv"] == pytest.approx(0.9 * extra)
    grouped = replace(PANGU, shape=load_shape("qwen3_30b_a3b", SHAPES).shape, copies_latents=True)
    assert copied_latents_bytes(grouped) == 0


def test_separate_cards_keep_their_states():
    apart = replace(PANGU, train=Parallel(384, 8, 8, 16), infer=Parallel(384, 8, 128), infer_first=384)
    assert not apart.shared and estimate_memory(apart).phases["switch"]["optimizer"] == 0
    assert (
        estimate_memory(replace(apart, rollout=EngineLimits(kv_fraction=0.45))).kv_tokens
        < estimate_memory(apart).kv_tokens
    )


@pytest.mark.parametrize("grid", [Parallel(4, 2, 2, 2), Parallel(4, 4, 2, 1, 2), Parallel(4, 1, 4)])
@pytest.mark.parametrize("bucket_bytes", [1 << 13, 1 << 14, 1 << 20])
def test_stacks_that_a_switch_holds_twice_are_those_of_the_layouts(grid, bucket_bytes):
    config, infer = tiny_config(num_hidden_layers=3, num_attention_heads=8), Parallel(4, 1, 2)
    fusion = SwitchLimits(bucket_bytes=bucket_bytes)
    setup = Setup(Shape("tiny", config), ASCEND_910C, grid, infer, fusion=fusion)
    expected = 0
    for parallel in (grid, infer):
        ranks = tuple(range(parallel.world))
        layout = Layout(config, parallel, ranks, dtype=torch.bfloat16, bucket_bytes=bucket_bytes, format="stacked")
        expected = max(expected, *map(layout.external_nbytes, ranks))
    assert stack_bytes(setup) == expected and (expected > 0) == (bucket_bytes < 1 << 20)
    assert stack_bytes(replace(setup, hardware=replace(ASCEND_910C, operators="cpu"))) == 0, "not stacked"
    assert estimate_memory(setup).total("switch") >= stack_bytes(setup)


def test_a_switch_needs_no_bucket_larger_than_the_weights():
    setup = Setup(Shape("tiny", tiny_config()), ASCEND_910C, Parallel(1), Parallel(1))
    switch = estimate_memory(setup).phases["switch"]
    assert 0 < switch["buckets"] == 4 * switch["weights"] < SwitchLimits().bucket_bytes


def test_what_does_not_fit_a_small_card_is_named_with_sizes_other_than_zero():
    hbm, reserved = replace(ASCEND_910C.hbm_bytes, value=float(1 << 16)), replace(ASCEND_910C.reserved_bytes, value=0.0)
    card = replace(ASCEND_910C, hbm_bytes=hbm, reserved_bytes=reserved)
    setup = Setup(Shape("tiny", tiny_config()), card, Parallel(1), Parallel(1))
    messages = [text for text in problems(setup, estimate_memory(setup)) if text.startswith("switch")]
    (message,) = messages
    assert re.fullmatch(r"switch takes [1-9][0-9.]*[KM] of 64.0K a die, buckets [1-9][0-9.]*[KM]", message)
