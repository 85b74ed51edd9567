from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion.model import Parallel
from fusion.offload import HostPool, StreamedStates
from fusion.training import AlgorithmConfig, load_checkpoint, save_checkpoint
from fusion.training.algorithms import make_algorithm
from tests.helpers import run_ranks, tiny_checkpoint
from tests.training.ranks import LONGEST, Case, make_engine, my_share, sample_batch

GRPO = make_algorithm(AlgorithmConfig(kl_coef=0.1), LONGEST).loss


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def step(engine: Any, seed: int) -> dict[str, float]:
    metrics = engine.forward_backward(my_share(sample_batch(8, seed), engine), GRPO)
    return metrics | engine.optimizer_step()


def interrupted(rank, device, case, folder):
    """Two steps after a checkpoint, by the engine that wrote it and by one that read it."""
    engine = make_engine(case, device)
    step(engine, 1)
    save_checkpoint(engine, folder)
    went_on = [step(engine, seed) for seed in (2, 3)]
    again = make_engine(case, device)
    load_checkpoint(again, folder)
    resumed = [step(again, seed) for seed in (2, 3)]
    left, right = engine.state_dict(), again.state_dict()
    equal = left["steps"] == right["steps"] and all(
        torch.equal(left["tensors"][name], right["tensors"][name]) for name in left["tensors"]
    )
    return went_on == resumed, equal


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(Parallel(4, 2, 2), "float32"), (Parallel(4, 2, 2, pp=2), "float32"), (Parallel(2, pp=2), "bfloat16")],
    ids=str,
)
def test_resume_is_bitwise(checkpoint, tmp_path, layout, dtype):
    case = Case(checkpoint, layout, {"warmup_steps": 3, "token_budget": 40}, dtype=dtype, bucket_bytes=20000)
    assert run_ranks(interrupted, layout.world, case, str(tmp_path / "trainer")) == [(True, True)] * layout.world
    assert [path.name for path in tmp_path.iterdir()] == ["trainer"]


def test_states_on_the_host_are_saved_and_taken_up_by_a_trainer_that_keeps_them_in_hbm(checkpoint, device, tmp_path):
    case, pool = Case(checkpoint, dtype="bfloat16", bucket_bytes=20000), HostPool(device)
    pool.take([50 << 20])
    streams = make_engine(case, device, states=partial(StreamedStates, pool=pool))
    step(streams, 1)
    save_checkpoint(streams, tmp_path / "trainer")
    tensors = streams.state_dict()["tensors"]
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(path.stat().st_size for path in (tmp_path / "trainer").iterdir()) < 2 * nbytes
    resident = make_engine(case, device)
    load_checkpoint(resident, tmp_path / "trainer")
    assert all(torch.equal(tensors[name].cpu(), t.cpu()) for name, t in resident.state_dict()["tensors"].items())
    assert step(resident, 2) == step(streams, 2)


def load_elsewhere(rank, device, case, folder):
    try:
        load_checkpoint(make_engine(case, device), folder)
    except ValueError as error:
        return str(error)


def test_another_layout_or_dtype_is_refused(checkpoint, device, tmp_path):
    folder = tmp_path / "trainer"
    save_checkpoint(make_engine(Case(checkpoint), device), folder)
    message = run_ranks(load_elsewhere, 2, Case(checkpoint, Parallel(2, pp=2)), str(folder))[1]
    assert "saved in the layout {'world': 1, 'tp': 1, 'ep': 1, 'pp': 1, 'etp': 1}" in message and "'pp': 2" in message
    with pytest.raises(ValueError, match="model.dtype"):
        load_checkpoint(make_engine(Case(checkpoint, dtype="bfloat16"), device), folder)
    with pytest.raises(ValueError, match=r"holds no trainer checkpoint \(trainer.json is missing\)"):
        load_checkpoint(make_engine(Case(checkpoint), device), tmp_path)


def test_a_broken_write_leaves_the_last_checkpoint(checkpoint, device, tmp_path):
    engine, folder = make_engine(Case(checkpoint), device), tmp_path / "trainer"
    save_checkpoint(engine, folder)
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    step(engine, 1)
    engine.state_dict = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(engine, folder)
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == written
    del engine.state_dict
    save_checkpoint(engine, folder)
    assert {path.name for path in tmp_path.iterdir()} == {"trainer"}
    fresh = make_engine(Case(checkpoint), device)
    load_checkpoint(fresh, folder)
    assert fresh.optimizer.steps == 1
