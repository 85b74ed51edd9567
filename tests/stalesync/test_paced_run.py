"""A whole run on emulated cards that take modelled time, as a user starts it."""

import json

import pytest

from tests.machine import patience
from tests.warm import launcher

PACED = """device=paced cluster.hardware=ascend_910c cluster.npus=2 data=addition data.max_prompt_length=8
data.prompts_per_step=4 rollout.max_response_length=20 rollout.sampling.forced_median=6 algorithm.group_size=4
run.eval_prompts=0 run.steps=1""".split()


def _rows(base, folder, *overrides):
    command = ["scripts/train.py", f"model.path={base}", f"run.dir={folder}", *PACED, *overrides]
    done = launcher().session().run(command, timeout_s=480)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()], done.stdout


@pytest.mark.extended
def test_two_cards_generate_in_the_modelled_time_and_tell_their_overrun(base, tmp_path):
    rows, out = _rows(base, tmp_path / "slow", "device.pace_speed=2")
    for row in rows:
        modelled = {n: row[f"pace/modelled_s/{n}"] for n in ("decode", "prefill", "switch", "train", "optimizer")}
        assert min(modelled.values()) > 0
        # Of two cards, one to the end and the other until its requests have ended: the longer one is what gen takes.
        generating = modelled["decode"] + modelled["prefill"]
        overrun_s = sum(value for name, value in row.items() if name.startswith("pace/overrun_s/"))
        assert generating / 2 < row["timing_s/gen"] < 1.1 * generating + overrun_s + patience(0.1)
        assert row["timing_s/gen"] == pytest.approx(row["pace/stage_s_max/gen"], rel=0.1, abs=patience(0.1))
        assert row["pace/ideal_s/decode"] < modelled["decode"]
    assert "cards took the time of qwen3_30b_a3b on ascend_910c" in out
    again, out = _rows(base, tmp_path / "fast", "device.pace_speed=10000")
    lengths = [f"response_length/{name}" for name in ("mean", "min", "max")]
    assert [[row[n] for n in lengths] for row in again] == [[row[n] for n in lengths] for row in rows]
    assert "INVALID: overrun" in out and "with a median of 6 (rollout.sampling.forced_median)" in out
