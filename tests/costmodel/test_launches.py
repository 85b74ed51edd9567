"""Launches are a floor of steps, and those that the benchmark counts; predictions stand beside published rates."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.costmodel.hardware import Figure, hardware_named
from fusion.costmodel.launches import COUNTS, Launches, decode_floor_s, launches_of
from fusion.costmodel.presets import load_shape
from fusion.costmodel.rates import LAUNCHES, PUBLISHED, decode_rate, published_rates, train_rate
from fusion.costmodel.roofline import Roofline
from fusion.costmodel.setup import Setup, Workload
from fusion.costmodel.step_time import generate_s, train_s
from fusion.model import Parallel
from tests.costmodel import launch_counts

SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
QWEN, DENSE = (load_shape(name, SHAPES).shape for name in ("qwen3_30b_a3b", "qwen3_14b"))
DEEPSEEK = load_shape("deepseek_r1_671b", SHAPES).shape
H100 = hardware_named("h100")
SLOW_HOST = replace(H100, launch_s=Figure(1e-3, "test"))
"""An H100 whose host is the limit of every step"""


@pytest.mark.parametrize("layout", ["tp1", pytest.param("tp2ep2", marks=pytest.mark.extended)])
def test_the_counts_are_those_of_the_benchmark(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_counts, "LAYOUTS", {layout: launch_counts.LAYOUTS[layout]})
    monkeypatch.setattr(launch_counts, "TABLES", [*COUNTS[layout]])
    sizes = Namespace(batch=64, contexts=[128], sequences=5, operations=False)
    decode, mla = launch_counts.decode(sizes), launch_counts.decode_mla(sizes)
    train = launch_counts.train(sizes)
    counted = {
        table: Launches(
            decode[table][layout], mla[table][layout], train[table][layout], train[table][f"{layout}_recompute"]
        )
        for table in COUNTS[layout]
    }
    assert counted == COUNTS[layout], "python benchmarks/launches.py counts them"


@given(st.integers(1, 4096), st.integers(1, 32768), st.sampled_from([QWEN, DEEPSEEK, DENSE]), st.booleans())
def test_lines_of_a_step_and_the_step_have_the_same_floor(sequences, context, shape, slow) -> None:
    roofline = Roofline(shape, SLOW_HOST if slow else H100, Parallel(8, ep=8 if shape.config.num_experts else 1))
    seconds = roofline.engine_step_s(sequences, sequences * context)
    assert max(line(sequences * context) for line in roofline.step_lines(sequences)) == pytest.approx(seconds)
    assert seconds >= roofline.launch_floor_s


def test_a_step_takes_at_least_its_launches_in_layers_with_experts() -> None:
    assert decode_floor_s(QWEN, H100, Parallel(1)) == pytest.approx(48 * 17 * 5.5e-6)
    assert decode_floor_s(DEEPSEEK, H100, Parallel(8, ep=8)) == pytest.approx(58 * 57 * 5.5e-6), "three are dense"
    assert decode_floor_s(DENSE, H100, Parallel(1)) == 0 == launches_of("plain", Parallel(1)).decode
    roofline = Roofline(QWEN, SLOW_HOST, Parallel(1))
    assert roofline.engine_step_s(1, 1) == pytest.approx(48 * 17e-3)
    budget, without, again = 4096, 98e-3, 133e-3
    for passes, recompute in ((without, False), (again, True)):
        for micro_batches in (1, 3):
            step_s = roofline.train_step_s(micro_batches * budget, 1, budget, recompute=recompute)
            assert step_s == pytest.approx(48 * micro_batches * passes)
    assert roofline.forward_s(budget, 1, budget) == pytest.approx(48 * (again - without))
    assert decode_rate(roofline, 8, 100).limit == train_rate(roofline, 1, 128).limit == LAUNCHES


def test_rankings_of_layouts_have_the_same_floors() -> None:
    work = Workload(samples=32, prompt=64.0, response=128.0, longest=256)
    setup = Setup(QWEN, SLOW_HOST, Parallel(8, ep=8), Parallel(8, ep=8), workload=work)
    assert generate_s(setup, kv_tokens=100_000) == pytest.approx(256 * 48 * 19e-3)
    assert train_s(setup) == pytest.approx(48 * 158e-3), "one micro-batch, with recomputation"
    assert train_s(replace(setup, hardware=H100)) < train_s(setup)


def test_published_rates_are_predicted_under_their_conditions() -> None:
    rows = {one.system: (one, rate) for one, rate in published_rates(Setup(QWEN, H100, Parallel(8), Parallel(8)))}
    assert {one.work for one, _ in rows.values()} == {"decode", "train"}
    for system in ("vLLM", "NeMo AutoModel"):
        one, rate = rows[system]
        assert rate.tokens_per_s == pytest.approx(one.tokens_per_s, rel=0.25)
    assert all(one.conditions and one.source.startswith("https://") for one in PUBLISHED)


@pytest.mark.parametrize(
    ("model", "work"),
    [
        ("qwen3_30b_a3b", {"decode", "train"}),
        ("qwen3_235b_a22b", {"decode", "train"}),
        ("deepseek_r1_671b", {"decode"}),
    ],
)
def test_published_rates_of_the_910c_are_predicted_within_a_factor_of_two(model: str, work: set[str]) -> None:
    shape = load_shape(model, SHAPES).shape
    setup = Setup(shape, hardware_named("ascend_910c"), Parallel(128, ep=128), Parallel(128, ep=128))
    rows = published_rates(setup)
    assert {one.work for one, _ in rows} == work
    assert all(one.tokens_per_s / 2 < rate.tokens_per_s < one.tokens_per_s * 2 for one, rate in rows)
