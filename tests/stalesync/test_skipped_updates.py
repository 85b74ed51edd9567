"""Runs whose rewards are so large that gradients overflow: such updates are skipped, counted and resumed, or end it."""

import pytest

from fusion.telemetry.run_contents import complete_checkpoints
from fusion.training.interface import SKIPPED_IN_A_ROW
from tests.stalesync.runs import kill, rows_of, train, wait_until
from tests.stalesync.test_killed import assert_same_weights

REWARD = """
import time, zlib

def score(prompt, response, answer, **fields):
    luck = zlib.crc32((prompt + response).encode()) % 1000 / 1000
    {pause}
    return luck * (1e37 if {overflows} else 1.0)
"""
OPTIONS = [
    "cluster.npus=1",
    "parallel=single",
    "algorithm=dr_grpo",
    "stalesync.max_staleness=0",
    "run.eval_prompts=0",
    "run.save_every=1",
    "run.keep=0",
    "data.min_digits=1",
]


def reward(folder, overflows, pause=""):
    (folder / "reward.py").write_text(REWARD.format(overflows=overflows, pause=pause))
    return f"reward.path={folder / 'reward.py'}:score"


def skipped_of(folder):
    return [row["training/skipped_updates"] for row in rows_of(folder / "run")]


@pytest.fixture
def prompts(tmp_path):
    """A file of as many rows as three steps have prompts; one of them overflows."""
    rows = [f'{{"prompt": "{number // 9}+{number % 9}=", "answer": "0"}}\n' for number in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    return f"data.source={tmp_path / 'rows.jsonl'}"


@pytest.mark.extended
def test_an_update_that_overflows_is_skipped_and_neither_the_run_nor_its_resume_ends(base, start, prompts, tmp_path):
    whole, options = tmp_path / "whole", [*OPTIONS, prompts, "run.steps=3", reward(tmp_path, "prompt == '1+4='")]
    whole.mkdir()
    done = train(base, whole, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(skipped_of(whole)) == [0, 0, 1] and "gradients were not finite" in done.stdout
    run = start(*options)
    wait_until(run, 60, lambda: len(skipped_of(tmp_path)) > skipped_of(whole).index(1))
    kill(run)
    done = train(base, tmp_path, *options, "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert skipped_of(tmp_path) == skipped_of(whole)
    assert_same_weights(tmp_path / "run", whole / "run")


@pytest.mark.extended
def test_three_skipped_updates_in_a_row_end_the_run_by_name_also_over_a_resume(base, tmp_path):
    options = [*OPTIONS, "run.steps=9", reward(tmp_path, "True")]
    for resumed in ([], ["run.resume=auto"]):
        done = train(base, tmp_path, *options, *resumed)
        assert done.returncode == 1 and "3 updates in a row were skipped up to step 3" in done.stderr, done.stderr
        assert [row[SKIPPED_IN_A_ROW] for row in rows_of(tmp_path / "run")] == [1, 2, 3], "one more step alone"
        assert sorted(complete_checkpoints(tmp_path / "run")) == [1, 2]
