"""How often a sample crosses from one process to another: what docs/house.md says is what a run does."""

import json
import re
from pathlib import Path

import pytest

from tests.machine import communicate
from tests.stalesync.runs import command_of, rows_of
from tests.warm import launcher

PAGE = Path(__file__).resolve().parents[2] / "docs" / "house.md"
STEPS, SAMPLES = 2, 8 * 4
ONCE_A_STEP = ("reference", "advantage train", "train", "ack train")


def crossings_of_the_page(reference):
    """Sender, receiver and whether there is one message a step, by the rows of "A sample"; with those of a reference
    if ``reference``."""
    text = PAGE.read_text().split("## A sample")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ║ \| ([\w ]+) → ([\w ]+) \| (.*) \|$", text, re.MULTILINE)
    return [(*ends, "once a step" in what) for *ends, what in rows if reference or "reference" not in what]


@pytest.mark.parametrize("reference", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_a_sample_crosses_processes_as_the_page_says(base, tmp_path, reference):
    options = ["cluster.npus=1", "parallel=single", f"run.steps={STEPS}", "run.eval_prompts=0"]
    options += ["algorithm.kl_coef=0.01", "algorithm.kl_in=reward"] if reference else []
    (_, *overrides), path = command_of(base, tmp_path, *options), tmp_path / "trace.jsonl"
    run = launcher().start(["tests/stalesync/traced_run.py", str(path), *overrides])
    out, err = communicate(run, 180)
    assert run.returncode == 0, out + err
    messages = [json.loads(line) for line in path.read_text().splitlines()]
    trained = {id for one in messages if one["what"] == "ack train" for id in one["ids"]}
    assert len(trained) == STEPS * SAMPLES and len(rows_of(tmp_path / "run")) == STEPS
    expected = crossings_of_the_page(reference)
    assert reference or len(expected) == 10
    for id in trained:  # a reward is acknowledged while the next stage begins
        assert sorted((one["from"], one["to"]) for one in messages if id in one["ids"]) == sorted(
            (sender, receiver) for sender, receiver, _ in expected
        )
    once = {one["what"]: (one["from"], one["to"]) for one in messages if one["what"] in ONCE_A_STEP}
    assert sorted(once.values()) == sorted((sender, receiver) for sender, receiver, says in expected if says)
    assert [sum(one["what"] == what for one in messages) for what in once] == [STEPS] * len(once)
