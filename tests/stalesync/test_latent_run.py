"""A whole run of a model of Pangu's architecture: latent attention, sandwich norms, dense and sparse layers."""

import pytest
import yaml

from fusion.model import ModelConfig, global_params
from fusion.npu import open_device
from stalesync.job.base_model import make_base_model
from tests.stalesync.runs import rows_of, train, weights_of
from tests.warm import ROOT

LAYOUTS = [f"parallel.train.{axis}=2" for axis in ("tp", "ep", "pp")] + ["parallel.infer.ep=4"]


@pytest.mark.extended  # layouts and latents alone: tests/training/test_families.py, tests/inference/test_latents.py
def test_a_tiny_pangu_trains_in_three_cuts_and_generates_in_another(tmp_path):
    shape = yaml.safe_load((ROOT / "recipes" / "shapes" / "tiny" / "pangu.yaml").read_text())["config"]
    base = tmp_path / "base"
    accuracy = make_base_model("addition", base, open_device("emulated"), shape=shape, target=0.05)
    assert accuracy >= 0.05

    done = train(base, tmp_path, "cluster=four", *LAYOUTS, "run.steps=2", "fusion.checksum=true")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    # Trainer and engine compute the same model: one expands latents, the other also attends to them.
    assert all(row["training/rollout_probs_diff_mean"] < 1e-5 for row in rows)

    exported = tmp_path / "run" / "hf"
    config, before, after = ModelConfig.from_hf(exported), weights_of(base), weights_of(exported)
    assert config == ModelConfig.from_hf(base)
    assert {name: tuple(tensor.shape) for name, tensor in after.items()} == global_params(config)
    unchanged = {name for name in after if after[name].equal(before[name])}
    assert not [name for name in unchanged if "experts" not in name], "every other tensor has a gradient"


def test_a_shape_that_is_not_supported_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="shape: model_type 'gpt2' is not supported"):
        make_base_model("addition", tmp_path / "base", open_device("emulated"), shape={"model_type": "gpt2"})
    assert not (tmp_path / "base").exists()
