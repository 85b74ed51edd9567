"""What is not trained (predictors of further tokens, correction biases) is saved, resumed in any layout and exported to
the bit, in its own dtype, and costs neither gradients nor optimizer states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fusion.model import ModelConfig, Parallel, global_params, local_params
from fusion.training.checkpoint import load_checkpoint
from fusion.training.export import export_checkpoint
from fusion.training.shards import SharedElements, untrained_parts
from tests.ep_switch.oracle import grids
from tests.families import add_predictors, family_checkpoint, random_fields, with_predictors
from tests.helpers import run_ranks
from tests.training.ranks import Case, make_engine
from tests.training.test_checkpoint import interrupted, save_state, state_of, step

KINDS = ["glm4_moe", "deepseek_v3", "pangu_ultra_moe"]
BALANCING = {"router_bias_rate": 0.01, "token_budget": 40}


@pytest.fixture(scope="module", params=[KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.extended)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("untrained")
    family_checkpoint(folder, request.param)
    add_predictors(folder)
    return str(folder)


@given(kind=st.sampled_from(KINDS), data=st.data(), count=st.integers(0, 2), max_numel=st.sampled_from([100, 1 << 20]))
def test_every_untrained_element_is_owned_once(kind: str, data: st.DataObject, count: int, max_numel: int) -> None:
    config = ModelConfig.from_hf(with_predictors(data.draw(random_fields(kind)), count))
    parallel = data.draw(st.sampled_from(grids(config, 8)))
    shapes, owners = global_params(config), dict[str, np.ndarray]()
    for rank in range(parallel.world):
        group = next(group for group in parallel.groups("tp") if rank in group)
        tables = [local_params(config, parallel, one, max_numel) for one in group]
        shared = SharedElements(tables, parallel.coordinate("tp", rank))
        for _, part, owned in untrained_parts(tables[group.index(rank)], shared, rank):
            times = owners.setdefault(part.name, np.zeros(shapes[part.name], int))
            times[tuple(slice(*span) for span in part.region)] += owned
    predicted = tuple(f"model.layers.{layer}." for layer in config.predictors)
    names = {name for name in shapes if name.endswith("e_score_correction_bias") or name.startswith(predicted or "-")}
    assert owners.keys() == names
    assert all((times == 1).all() for times in owners.values())


def test_they_have_no_gradient_and_no_state(checkpoint: str, device: Any) -> None:
    engine = make_engine(Case(checkpoint, dtype="bfloat16"), device)
    table = engine.model.table
    trained = {param.name for param in table if param.storage == "unit"}
    assert {*engine.optimizer.gradients.views} == trained < {param.name for param in table}
    numel = sum(param.numel for param in table if param.storage == "unit")
    states = engine.optimizer_states()
    assert sum(state.numel() for state in states.values()) < 3 * (numel + 16 * len(trained))


def loaded_state(rank: int, device: Any, case: Case, folder: str) -> Any:
    """The state that a trainer has loaded over other values."""
    engine = make_engine(case, device)
    for param in engine.model.weights.apart:
        engine.model.weights.views[param.name].fill_(-3.0)
    load_checkpoint(engine, folder)
    return state_of(engine)


PAIRS = {
    "one-tp2ep2pp2": ("bfloat16", Parallel(), Parallel(8, 2, 2, pp=2)),
    "tp4ep2-pp3": ("float32", Parallel(4, 4, 2), Parallel(3, pp=3)),
    "tp2ep2etp2-dp2": ("bfloat16", Parallel(4, 2, 2, etp=2), Parallel(2)),
}


@pytest.mark.parametrize(
    "pair", ["one-tp2ep2pp2", *(pytest.param(name, marks=pytest.mark.extended) for name in [*PAIRS][1:])]
)
def test_another_layout_resumes_and_exports_them_to_the_bit(checkpoint: str, tmp_path: Path, pair: str) -> None:
    dtype, before, after = PAIRS[pair]
    cases = [Case(checkpoint, layout, BALANCING, dtype=dtype, bucket_bytes=20000) for layout in (before, after)]
    saved = run_ranks(save_state, before.world, cases[0], str(tmp_path / "trainer"))[0][1]
    loaded = run_ranks(loaded_state, after.world, cases[1], str(tmp_path / "trainer"))[0][1]
    export_checkpoint(tmp_path / "trainer", tmp_path / "out")
    exported, base = load_file(tmp_path / "out" / "model.safetensors"), load_file(f"{checkpoint}/model.safetensors")
    assert saved.keys() == loaded.keys() == exported.keys() == base.keys()
    (predictor,) = ModelConfig.from_hf(checkpoint).predictors
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor) and torch.equal(exported[name], tensor), name
        is_correction = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if is_correction else getattr(torch, dtype)), name
        if name.startswith(f"model.layers.{predictor}."):
            assert torch.equal(tensor, base[name].to(tensor.dtype)), "of a predictor"
        elif is_correction:
            moved = ((tensor - base[name]).abs() / BALANCING["router_bias_rate"]).round()
            assert ((moved == 0) | (moved == 1)).all() and moved.any(), "not by one step of the rate"


def test_resume_is_bitwise_with_biases_that_move(checkpoint: str, tmp_path: Path) -> None:
    case = Case(checkpoint, Parallel(2, ep=2), BALANCING, dtype="bfloat16", bucket_bytes=20000)
    assert run_ranks(interrupted, 2, case, str(tmp_path / "trainer")) == [(True, True)] * 2


def test_a_copy_of_the_state_keeps_the_biases_of_its_step(checkpoint: str, device: Any) -> None:
    engine = make_engine(Case(checkpoint, training=BALANCING), device)
    state = engine.state_dict()
    copied = state | {"tensors": {name: tensor.clone() for name, tensor in state["tensors"].items()}}
    before = {name: view.clone() for name, view in engine.weight_views(copied).items()}
    step(engine, 1)
    now = engine.weight_views(engine.state_dict())
    biases = [param.name for param in engine.model.table if param.storage == "card"]
    assert biases and all(torch.equal(engine.weight_views(copied)[name], before[name]) for name in before)
    assert any(not torch.equal(now[name], before[name]) for name in biases)
