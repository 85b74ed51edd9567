"""The settings with which a setup fits: they do fit, and nothing smaller does."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.costmodel.fitting import advice, alternatives, changed, fitting_settings
from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.memory import estimate_memory
from fusion.costmodel.presets import load_shape
from fusion.costmodel.search import phase_problems, problems
from fusion.costmodel.setup import Setup, SwitchLimits, TrainingLimits, Workload
from fusion.model import Parallel

H100 = hardware_named("h100")
SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
QWEN3 = load_shape("qwen3_30b_a3b", SHAPES).shape
EIGHT = Setup(QWEN3, H100, Parallel(8, ep=8), Parallel(8, ep=8), workload=Workload(512, 512.0, 300.0, 1024))


def of_hbm(setup: Setup, gib: float) -> Setup:
    hbm = replace(H100.hbm_bytes, value=gib * 2**30)
    return replace(setup, hardware=replace(H100, hbm_bytes=hbm))


def test_qwen3_30b_on_eight_h100_needs_streamed_states() -> None:
    train = estimate_memory(EIGHT).phases["train"]
    assert train["weights"] == pytest.approx(10e9, rel=0.05)
    assert train["gradients"] == pytest.approx(20e9, rel=0.05)
    assert train["optimizer"] == pytest.approx(46e9, rel=0.02)
    assert train["activations"] < 10e9, "of logits those of a tile; whole ones would take 25 GB"
    (problem,) = problems(EIGHT, estimate_memory(EIGHT))
    assert problem.startswith("train takes") and "optimizer" in problem
    assert fitting_settings(EIGHT) == {"fusion.offload": "stream"}
    assert advice(EIGHT) == "it fits with fusion.offload=stream"


def test_a_setup_that_fits_needs_no_change_and_one_that_cannot_fit_is_given_up() -> None:
    assert fitting_settings(replace(EIGHT, fusion=SwitchLimits(offload="stream"))) == {}
    assert fitting_settings(of_hbm(EIGHT, 30)) is None
    assert "use more cards" in advice(of_hbm(EIGHT, 30))


def test_settings_are_named_as_the_command_line_takes_them() -> None:
    tight = replace(of_hbm(EIGHT, 50), training=TrainingLimits(recompute=False))
    assert advice(tight) == "it fits with fusion.offload=stream training.recompute=true"


@settings(max_examples=60)
@given(
    gib=st.floats(20, 120),
    offload=st.sampled_from(["none", "switch", "stream"]),
    double=st.booleans(),
    recompute=st.booleans(),
    tokens=st.sampled_from([2048, 16384, 65536]),
    apart=st.booleans(),
)
def test_what_is_found_fits_and_no_fewer_settings_do(gib, offload, double, recompute, tokens, apart) -> None:
    setup = replace(
        of_hbm(EIGHT, gib),
        training=TrainingLimits(tokens, recompute),
        fusion=SwitchLimits(offload=offload, double_buffer=double),
        infer_first=8 if apart else 0,
    )
    found = fitting_settings(setup)
    if found is None:
        assert problems(setup, estimate_memory(setup))
        return
    assert not problems(changed(setup, found), estimate_memory(changed(setup, found)))
    for chosen in combinations(alternatives(setup), max(0, len(found) - 1)):
        if len(found) and len(dict(chosen)) == len(chosen):
            fewer = changed(setup, dict(chosen))
            assert problems(fewer, estimate_memory(fewer))


def test_a_micro_batch_is_no_larger_than_the_samples_of_a_rank() -> None:
    few = replace(EIGHT, workload=Workload(8, 100.0, 50.0, 100))
    assert few.micro_batch_tokens == 200 and EIGHT.micro_batch_tokens == 16384
    assert not phase_problems(few, estimate_memory(few))
