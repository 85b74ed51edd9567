"""Runs that resume on another number of cards and in another layout, one of them from a damaged checkpoint."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.stalesync.runs import FOUR, kill, rows_of, train, wait_until, weights_of
from tests.stalesync.test_stale_run import STALE, TWO
from tests.warm import ROOT

COMMON = ["run.eval_prompts=0", "run.save_every=1", "run.keep=0", "training.lr=1e-3", "algorithm.kl_coef=0.01"]
COMPARED = "critic/rewards/mean", "response_length/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm"


@pytest.mark.extended  # the trainer's part: tests/training/test_checkpoint.py
def test_a_run_on_two_cards_goes_on_on_four_from_the_newest_whole_checkpoint(base, tmp_path):
    """At staleness 0 samples and rewards are those of the run that was not interrupted; sums over more ranks are
    rounded otherwise."""
    two = train(base, tmp_path, *TWO, *COMMON, "run.steps=5")
    assert two.returncode == 0, two.stdout + two.stderr
    run, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(run, moved)
    for step in (4, 5):
        shutil.rmtree(moved / "checkpoints" / f"step-{step}")
    shard = moved / "checkpoints" / "step-3" / "trainer" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    four = train(base, tmp_path, *FOUR, *COMMON, "run.name=moved", "run.steps=5", "run.resume=true")
    assert four.returncode == 0, four.stdout + four.stderr
    told = " ".join(four.stdout.split())
    assert "step-3 is damaged: trainer/rank-00001.safetensors does not match its digest. Going back to step-2" in told
    assert "step 2" in told and "saved by 2 cards in TP1EP1DP2" in told
    theirs, ours = rows_of(run), rows_of(moved)
    assert [row["step"] for row in ours] == [1, 2, 3, 4, 5] and ours[:2] == theirs[:2]
    for before, after in zip(theirs[2:], ours[2:], strict=True):
        for figure in COMPARED:
            assert after[figure] == pytest.approx(before[figure], rel=1e-3, abs=1e-5), (figure, after["step"])
    assert sorted(path.name for path in (moved / "checkpoints").iterdir()) == sorted(
        [*(f"step-{step}" for step in range(1, 6)), "step-3.damaged"]
    )
    _exports_any_kept_checkpoint(moved, tmp_path)


def _exports_any_kept_checkpoint(run, tmp_path):
    def convert(*words):
        command = [sys.executable, "scripts/convert.py", *map(str, words)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = convert(run, tmp_path / "newest")
    assert done.returncode == 0 and "the model after step 5" in done.stdout, done.stderr
    newest, exported = weights_of(tmp_path / "newest"), weights_of(run / "hf")
    assert newest.keys() == exported.keys() and all(torch.equal(newest[name], exported[name]) for name in exported)
    copy = shutil.copytree(run / "checkpoints" / "step-2", run / "checkpoints" / "step-2-good")
    done = convert(copy, tmp_path / "second")
    assert done.returncode == 0 and "the model after step 2" in done.stdout, done.stderr
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "second", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "second")) == 32
    assert not torch.equal(weights_of(tmp_path / "second")["model.norm.weight"], newest["model.norm.weight"])
    done = convert(run, tmp_path / "newest")
    assert done.returncode == 1 and "expected a new or an empty folder" in done.stderr
    done = convert(run / "checkpoints" / "step-3.damaged", tmp_path / "third")
    assert done.returncode == 1 and "trainer/rank-00001.safetensors does not match" in done.stderr
    assert not (tmp_path / "third").exists()


@pytest.mark.extended
def test_samples_under_way_go_on_with_other_engines_and_none_is_lost_or_doubled(base, start, tmp_path):
    stale = [*STALE, "stalesync.max_staleness=1", "run.save_every=0.2s"]
    folder = tmp_path / "run"
    run = start(*stale, *TWO, "fusion=hybrid", "run.steps=1000")
    wait_until(run, 60, lambda: list(folder.glob("checkpoints/step-*/queue")) and len(rows_of(folder)) >= 4)
    kill(run)
    steps = max(row["step"] for row in rows_of(folder)) + 3
    done = train(base, tmp_path, *stale, *FOUR, "fusion=colocated", f"run.steps={steps}", "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from" in done.stdout
    groups = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows_of(folder)] == list(range(1, steps + 1))
    assert len({row["group"] for row in groups}) == len(groups) == 8 * steps, "none lost, none twice"
    assert rows_of(folder)[-1]["distqueue/ended/done"] == 32 * steps, "nor any of their samples"
    assert max(row["lag"] for row in groups) <= 1


@pytest.mark.extended
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_run_whose_reference_had_a_card_of_its_own_goes_on_without_it(base, tmp_path, kl_in):
    """What that card has computed of groups in progress is in the checkpoint, and is not computed again."""
    options = [*COMMON, "fusion=separate", "parallel=single", "stalesync.max_staleness=1"]
    own = [*options, "cluster.npus=3", "fusion.score_cards=1", "algorithm.kl_in=loss", "run.steps=4"]
    done = train(base, tmp_path, *own)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    for step in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    assert json.loads((run / "checkpoints" / "step-2" / "controller.json").read_text())["reference_kl"]
    more = [*options, "cluster.npus=2", f"algorithm.kl_in={kl_in}", "run.steps=4", "run.resume=true"]
    done = train(base, tmp_path, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    groups = [json.loads(line) for line in (run / "groups.jsonl").read_text().splitlines()]
    assert len({row["group"] for row in groups}) == len(groups) == 32
    assert {row["ended"] for row in groups} == {"trained"} and len(rows_of(run)) == 4
