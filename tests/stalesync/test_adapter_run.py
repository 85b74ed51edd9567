"""Whole runs that train adapters: what a switch sends, what is saved, and where a resumed run goes on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fusion.model import ModelConfig, Parallel
from fusion.model.adapters import Adapters
from fusion.model.table import local_params
from tests.stalesync.runs import kill, rows_of, train, wait_until, weights_of
from tests.stalesync.test_killed import _figures, _newest, assert_same_weights
from tests.warm import launcher

LORA = ["training.lora.rank=4", "training.lora.alpha=8", "training.lr=1e-2", "algorithm.kl_coef=0.01"]
SEPARATE = ["cluster=four", "fusion=separate", "parallel=tp2ep2_ep2", "fusion.checksum=true"]


@pytest.fixture(scope="module")
def separate(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("separate")
    done = train(base, folder, *SEPARATE, *LORA, "run.steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training.lora.rank=4: adapters alone are trained; training.lr=0.01" in done.stdout
    return folder / "run"


def test_cards_that_only_generate_receive_adapters_alone(base, separate):
    config = replace(ModelConfig.from_hf(base), adapters=Adapters(4, 8.0))
    engine = Parallel(2, ep=2)
    held = sum(param.numel for rank in range(2) for param in local_params(config, engine, rank) if param.trained)
    for row in rows_of(separate):
        assert row["switch/bytes_moved_total"] == 4 * held
        assert row["training/rollout_probs_diff_mean"] < 1e-5


def test_exported_adapters_are_those_of_the_checkpoint_and_merge_into_a_model(base, separate, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    script = launcher().session()
    for out, *options in (("adapter",), ("merged", "--merge")):
        done = script.run(["scripts/convert.py", str(separate), str(tmp_path / out), *options], 60)
        assert done.returncode == 0, done.stdout + done.stderr
    exported = load_file(separate / "hf" / "adapter_model.safetensors")
    converted = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert exported.keys() == converted.keys()
    assert all(torch.equal(tensor, converted[name]) for name, tensor in exported.items())

    ids = torch.arange(2, 10).unsqueeze(0)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = plain(ids).logits
    adapted = peft.PeftModel.from_pretrained(plain, separate / "hf")(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=1e-5)
    assert float((adapted - before).abs().max()) > 1e-4, "something was learned"


@pytest.mark.extended
def test_a_run_begins_with_given_adapters_and_refuses_those_of_another_shape(base, separate, tmp_path):
    given = f"model.adapter={separate / 'hf'}"
    done = train(base, tmp_path, *LORA, given, "cluster.npus=2", "parallel=single", "run.steps=1", "training.lr=0")
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = weights_of(tmp_path / "run" / "hf"), weights_of(separate / "hf")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for changed, message in (
        ("training.lora.rank=8", "r=4; training.lora.rank is 8"),
        ("training.lora.targets=[attention]", "also holds 'base_model.model.model.layers.0.mlp"),
    ):
        done = train(base, tmp_path, *LORA, given, changed)
        assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.extended
@pytest.mark.parametrize("layout", [["cluster.npus=2", "parallel=single"], ["cluster=four", "parallel=tp2ep2_ep4"]])
def test_a_run_that_is_killed_and_resumed_is_bitwise_one_that_was_not(base, start, tmp_path, layout):
    whole, folder = tmp_path / "whole", tmp_path
    options = [*layout, *LORA, "run.eval_prompts=0", "run.save_every=1", "run.steps=8"]
    done = train(base, whole, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    run = start(*options)
    wait_until(run, 60, lambda: _newest(folder / "run") > 1)
    kill(run)
    assert _newest(folder / "run") < 8, "it was killed under way"
    done = train(base, folder, *options, "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _figures(folder / "run") == _figures(whole / "run")
    assert_same_weights(folder / "run", whole / "run")
    trainer = json.loads(next(Path(folder).glob("run/checkpoints/*/trainer/trainer.json")).read_text())
    assert trainer["adapters"]["rank"] == 4
    done = train(base, folder, *options[:-1], "run.steps=9", "run.resume=true", "training.lora.rank=2")
    assert done.returncode == 1 and "training.lora.rank=2: cannot resume: expected 4" in done.stderr, done.stderr


@pytest.mark.extended
def test_an_evaluation_of_a_checkpoint_uses_its_adapters(separate, tmp_path):
    done = (
        launcher()
        .session()
        .run(["scripts/evaluate.py", str(separate), f"run.dir={tmp_path}", "--json", str(tmp_path / "found.json")], 120)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = [json.loads(line) for line in (separate / "evaluations.jsonl").read_text().splitlines()][-1]
    (found,) = json.loads((tmp_path / "found.json").read_text())["results"]
    assert found["estimates"] == last["estimates"]
