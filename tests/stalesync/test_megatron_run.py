"""Whole runs with training.backend=megatron: the embedded trainer's curves, the same first step, kill and resume."""

import importlib.util

import pytest
import torch
import yaml

from fusion.npu import open_device
from stalesync.job.base_model import make_base_model
from tests.stalesync.loop.test_saving import _whole
from tests.stalesync.runs import FOUR, kill, rows_of, train, wait_until, weights_of
from tests.warm import ROOT

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="pip install -e .[megatron]"),
]

MEGATRON = "training.backend=megatron"
OPTIONS = ["run.eval_prompts=0", "fusion.checksum=true", "training.lr=1e-3"]


def trained_by_both(base, folder, *options):
    """The rows of metrics of a run with each backend. Both sample the same tokens in step 1, and train alike."""
    rows = {}
    for name, chosen in {"embedded": [], "megatron": [MEGATRON]}.items():
        done = train(base, folder, f"run.name={name}", *OPTIONS, *options, "run.steps=3", *chosen, timeout_s=400)
        assert done.returncode == 0, done.stdout + done.stderr
        rows[name] = rows_of(folder / name)
    samples = [(folder / name / "samples.jsonl").read_text().splitlines() for name in rows]
    first = [sorted(line for line in of_run if '"step": 1,' in line) for of_run in samples]
    assert first[0] and first[0] == first[1], "the engine samples step 1 from the same weights"
    for one, other in zip(rows["embedded"], rows["megatron"], strict=True):
        for figure in ("critic/rewards/mean", "response_length/mean"):
            assert other[figure] == pytest.approx(one[figure], rel=0.2), figure
    one, other = rows["embedded"][0], rows["megatron"][0]
    assert one["actor/grad_norm"] > 0.01 and one["critic/rewards/mean"] == other["critic/rewards/mean"]
    for figure in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
        assert other[figure] == pytest.approx(one[figure], rel=1e-4, abs=1e-6), figure
    assert other["memory/infer/optimizer_mib"] == other["memory/infer/gradients_mib"] == 0
    return rows


def test_four_cards_train_with_megatron_as_with_the_embedded_model(base, luck, tmp_path):
    rows = trained_by_both(base, tmp_path, *FOUR, luck)
    ours, theirs = (weights_of(tmp_path / name / "hf") for name in rows)
    assert ours.keys() == theirs.keys()


def test_a_tiny_deepseek_trains_in_three_cuts_with_megatron_as_with_the_embedded_model(luck, tmp_path):
    """Latent attention, a dense layer and sparse ones in stages, each sequence balanced, biases that move."""
    shape = yaml.safe_load((ROOT / "recipes" / "shapes" / "tiny" / "deepseek.yaml").read_text())["config"]
    base = tmp_path / "base"
    make_base_model("addition", base, open_device("emulated"), shape=shape, target=0.05)
    layouts = ["cluster=four", *(f"parallel.train.{axis}=2" for axis in ("tp", "ep", "pp")), "parallel.infer.ep=4"]
    balance = [
        "training.load_balancing=sequence",
        "training.load_balancing_coef=1e-3",
        "training.router_bias_rate=1e-3",
    ]
    rows = trained_by_both(base, tmp_path, *layouts, luck, *balance)
    one, other = rows["embedded"][0], rows["megatron"][0]
    balance_loss = "actor/load_balancing_loss"
    assert other[balance_loss] == pytest.approx(one[balance_loss], rel=1e-4) and one[balance_loss] > 0
    # Trainer and engine compute the same model, also after a switch to the engine's layout and back.
    assert all(row["training/rollout_probs_diff_mean"] < 1e-5 for row in rows["megatron"])
    before, theirs = weights_of(base), weights_of(tmp_path / "megatron" / "hf")
    assert before.keys() == theirs.keys()
    unchanged = {name for name in before if torch.equal(before[name], theirs[name])}
    assert not [name for name in unchanged if "mlp.experts" not in name], "every other tensor is trained or moved"


def test_bfloat16_with_replay_a_reference_and_recomputation(base, luck, tmp_path):
    """Weights return from masters on the host, the trainer computes with the reference's weights, and the experts are
    the engine's; the checksums of both layouts are compared at every switch."""
    options = ["model=bfloat16", "algorithm.replay=rollout", "algorithm.kl_coef=0.01", "training.recompute=true"]
    done = train(base, tmp_path, MEGATRON, *FOUR, *OPTIONS, luck, "run.steps=2", *options, timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 and all(0.01 < row["actor/grad_norm"] < 100 for row in rows)
    assert all(row["training/routing_mismatch"] < 0.1 for row in rows), "both route nearly alike in bfloat16"
    assert rows[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6), "the reference is the policy before its first step"
    assert rows[0]["training/rollout_logprobs_diff_mean"] < 0.05


def test_a_run_on_megatron_that_is_killed_and_resumed_is_bitwise_the_one_that_was_not(base, start, luck, tmp_path):
    options = [MEGATRON, *OPTIONS, luck, "cluster.npus=1", "parallel=single", "run.steps=6", "run.save_every=1"]
    whole = train(base, tmp_path / "whole", *options, timeout_s=400)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    run = start(*options)
    wait_until(run, 200, lambda: any(_whole(tmp_path / "run")))
    kill(run)
    done = train(base, tmp_path, *options, "run.resume=true", timeout_s=400)
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stdout + done.stderr
    figures = [
        [(row["critic/rewards/mean"], row["actor/grad_norm"]) for row in rows_of(folder / "run")]
        for folder in (tmp_path, tmp_path / "whole")
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 6 and all(norm > 0.01 for _, norm in figures[0])
    ours, theirs = (weights_of(folder / "run" / "hf") for folder in (tmp_path, tmp_path / "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
