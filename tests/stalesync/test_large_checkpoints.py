"""A whole run from a checkpoint as the large models are published: float8 matrices, a layer that predicts further
tokens, routers with a correction bias."""

import json
from pathlib import Path

import pytest
import torch

from stalesync.prompts.tokenizer import make_tokenizer
from tests.families import add_predictors, family_checkpoint
from tests.model.test_quantization import quantize_folder
from tests.stalesync.runs import FOUR, rows_of, train, weights_of
from tests.stalesync.test_stale_run import TWO

RATE = 0.01
OPTIONS = [
    "model.dtype=bfloat16",
    f"training.router_bias_rate={RATE}",
    "algorithm.kl_coef=0.01",
    "fusion.checksum=true",
    "run.eval_prompts=0",
    "run.save_every=1",
]


@pytest.mark.extended  # its parts: tests/model, tests/training, tests/colocate
def test_a_run_trains_resumes_elsewhere_and_exports_all_of_it(tmp_path: Path) -> None:
    add_predictors(family_checkpoint(tmp_path / "bf16", "glm4_moe"))
    base = quantize_folder(str(tmp_path / "bf16"), tmp_path / "fp8")
    make_tokenizer(tmp_path / "fp8")
    for steps, cards in ((2, FOUR), (3, [*TWO, "fusion=separate"])):
        done = train(tmp_path / "fp8", tmp_path, *OPTIONS, *cards, f"run.steps={steps}", "run.resume=auto")
        assert done.returncode == 0, done.stdout + done.stderr
        exported = weights_of(tmp_path / "run" / "hf")
        assert exported.keys() == base.keys() and len(rows_of(tmp_path / "run")) == steps
        for name, tensor in exported.items():
            if name.startswith("model.layers.3."):
                assert torch.equal(tensor, base[name].to(tensor.dtype)), name
            elif name.endswith("e_score_correction_bias"):
                moved = (tensor - base[name]) / RATE
                assert tensor.dtype == torch.float32 and moved.abs().max().round() in range(1, steps + 1)
                assert ((moved - moved.round()).abs() < 1e-3).all(), "not by steps of the rate"
            else:
                assert tensor.dtype == torch.bfloat16
    config = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and "quantization_config" not in config
