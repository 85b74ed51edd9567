"""Layers that predict further tokens are loaded in any layout and exported bitwise, and cost no memory of a card."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fusion.ep_switch import Layout
from fusion.model import (
    Mesh,
    ModelConfig,
    Parallel,
    Transformer,
    check_folder,
    global_params,
    load_weights,
    local_params,
    save_folder,
)
from fusion.npu import open_device
from tests.ep_switch.oracle import grids
from tests.families import add_predictors, family_checkpoint, family_config, random_fields, with_predictors
from tests.helpers import run_ranks
from tests.model.test_layouts import logits_and_export

KINDS = ["glm4_moe", "deepseek_v3", "pangu_ultra_moe"]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predictors")
    family_checkpoint(folder, request.param)
    add_predictors(folder, 2)
    return folder


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_a_folder_with_predictors_is_read_and_written(checkpoint: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_hf(checkpoint)
    assert config.num_predictors == 2 and {*global_params(config)} == {*exported(checkpoint)}
    check_folder(checkpoint, config)
    model = Transformer(config, Mesh.single(), open_device("emulated"), bucket_bytes=5000)
    load_weights(model, checkpoint)
    save_folder(model, tmp_path)
    assert ModelConfig.from_hf(tmp_path) == config == ModelConfig.from_hf(config.to_hf())
    assert_equal(exported(tmp_path), exported(checkpoint))


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(4, tp=2, ep=2, pp=2),
        pytest.param(Parallel(4, tp=4, ep=2), marks=pytest.mark.extended),
        pytest.param(Parallel(4, tp=2, ep=2, etp=2), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_every_layout_loads_and_exports_them_bitwise(checkpoint: Path, tmp_path: Path, parallel: Parallel) -> None:
    run_ranks(logits_and_export, parallel.world, parallel, str(checkpoint), str(tmp_path))
    assert_equal(exported(tmp_path), exported(checkpoint))


def test_they_take_no_memory_of_a_card_and_none_of_an_engine(checkpoint: Path) -> None:
    config, device = ModelConfig.from_hf(checkpoint), open_device("emulated")
    allocated = []
    for one in (config, config.without_predictors):
        before = device.memory().allocated
        model = Transformer(one, Mesh.single(), device, bucket_bytes=5000)
        allocated.append(device.memory().allocated - before)
        on_host = [name for name, view in model.weights.views.items() if view.device.type == "cpu"]
        assert bool(on_host) == bool(one.num_predictors)
        del model
    assert allocated[0] == allocated[1] > 0
    layouts = [Layout(one, Parallel(2, tp=2), (0, 1)) for one in (config, config.without_predictors)]
    assert layouts[0].units(0) == layouts[1].units(0)


@given(kind=st.sampled_from(KINDS), data=st.data(), count=st.integers(1, 2), max_numel=st.sampled_from([None, 100]))
def test_each_is_held_once_by_the_last_stage(kind: str, data: st.DataObject, count: int, max_numel: int | None) -> None:
    config = ModelConfig.from_hf(with_predictors(data.draw(random_fields(kind)), count))
    parallel = data.draw(st.sampled_from(grids(config, 8)))
    shapes = global_params(config)
    covered = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for rank in range(parallel.world):
        for param in local_params(config, parallel, rank, max_numel):
            if param.storage != "host":
                assert not any(part.name.startswith(prefixes(config)) for part in param.parts)
                continue
            assert parallel.coordinate("pp", rank) == parallel.pp - 1
            for part in param.parts:
                assert part.name.startswith(prefixes(config))
                covered[part.name][tuple(slice(*span) for span in part.region)] += 1
    for name, times in covered.items():
        if name.startswith(prefixes(config)):
            assert (times >= 1).all() and (times <= parallel.tp).all(), name
            assert ".experts." not in name or (times == 1).all(), name


def prefixes(config: ModelConfig) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}." for layer in config.predictors)


def test_a_checkpoint_without_their_tensors_has_none(tmp_path: Path) -> None:
    folder = Path(family_checkpoint(tmp_path, "glm4_moe"))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    config = ModelConfig.from_hf(folder)
    assert config == family_config("glm4_moe") and config.num_predictors == 0
    check_folder(folder, config)
    assert ModelConfig.from_hf(fields | {"num_nextn_predict_layers": 1}).num_predictors == 1, "of a config alone"


def test_a_predictor_of_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    tensors = add_predictors(family_checkpoint(tmp_path, "glm4_moe"))
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the tensor 'model.layers.3.eh_proj.weight'"):
        check_folder(tmp_path, ModelConfig.from_hf(tmp_path))
