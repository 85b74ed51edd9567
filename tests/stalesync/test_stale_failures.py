"""Whoever fails or hangs while training and generation run ahead of each other is named, or the run continues without
it: whole runs, real Ray, real workers, emulated cards."""

import json
import os
import re
import signal
import time
from collections import Counter

import pytest

from stalesync.job.control import submit
from tests.machine import communicate, patience, within
from tests.stalesync.runs import assert_gone, descendants, rows_of, train, wait_until

STALE = [
    "cluster.npus=2",
    "parallel=single",
    "fusion=hybrid",
    "stalesync.max_staleness=1",
    "rollout.max_response_length=60",
    "rollout.sampling.forced_median=8",
    "run.eval_prompts=0",
]


HALF = """
import time, zlib

def score(prompt, response, answer, **fields):
    if zlib.crc32(prompt.encode()) % 2:
        raise RuntimeError("no such judge")
    luck = zlib.crc32((prompt + response).encode()) % 31
    if luck == 0:
        time.sleep(60)
    return "good" if luck == 1 else float(len(response) % 3)
"""
"""Fails whole groups, and single samples of others in other ways."""


def _processes(run, name):
    return [pid for pid, command in sorted(descendants(run.pid).items()) if f"ray::{name}" in command]


def _told_within(run, seconds):
    """The error with which the run ends, and how long that takes."""
    below, began = descendants(run.pid), time.monotonic()
    _, err = communicate(run, 60)
    took = time.monotonic() - began
    assert run.returncode == 1 and within(took, seconds), (took, err)
    assert_gone(below)
    return err[err.index("error: ") :]


@pytest.mark.extended  # in the default deployment: tests/stalesync/test_run.py
def test_a_worker_that_is_killed_ends_the_run_within_15_s(start):
    run = start(*STALE, "run.steps=1000", "run.max_engine_restarts=0")
    os.kill(_processes(run, "Card")[1], signal.SIGKILL)
    assert "died" in (told := _told_within(run, 15)) and "rank " in told, told


@pytest.mark.parametrize(
    "deployment", [pytest.param(deployment, marks=pytest.mark.extended) for deployment in ("hybrid", "separate")]
)
def test_a_worker_that_hangs_ends_the_run_within_its_timeout_and_is_named(start, deployment):
    limit_s = round(patience(4))
    run = start(*STALE, f"fusion={deployment}", "run.steps=1000", f"cluster.stage_timeout_s={limit_s}")
    os.kill(_processes(run, "Card")[1], signal.SIGSTOP)
    told = _told_within(run, limit_s + 19)
    assert len(re.findall(r"rank \d did not answer", told)) == 1 and "it hangs" in told, told


@pytest.mark.extended
def test_rewards_that_fail_are_counted_and_a_checkpoint_records_every_group_that_has_ended(base, tmp_path):
    (tmp_path / "judge.py").write_text(HALF)
    steps = 8
    judge = [
        f"reward.path={tmp_path / 'judge.py'}:score",
        "reward.time_limit_s=0.3",
        "reward.workers=1",
        "reward.max_failed_share=1",
    ]
    saved = ["rollout.sampling.forced_median=20", "run.save_every=1", "run.keep=0", f"run.steps={steps}"]
    done = train(base, tmp_path, *STALE, *judge, *saved)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "run")
    failed = {kind: sum(row[f"reward/failed_{kind}"] for row in rows) for kind in ("raised", "timeout", "bad_type")}
    assert min(failed.values()) > 0 and sum(failed.values()) == sum(row["reward/failed"] for row in rows), failed
    assert "a sample failed" in done.stderr and "judge.py" in done.stderr
    assert max(row["staleness/max"] for row in rows) <= 1
    groups = [json.loads(line) for line in (tmp_path / "run" / "groups.jsonl").read_text().splitlines()]
    assert any(row["ended"] == "failed:reward_raised" for row in groups)
    for step in range(1, steps + 1):
        state = json.loads((tmp_path / "run" / "checkpoints" / f"step-{step}" / "controller.json").read_text())
        assert Counter(row["ended"] for row in groups if row["step"] <= step) == state["ledger"]["ended"], step


def test_a_shard_of_the_queue_that_is_killed_is_started_anew_and_the_end_of_the_queue_is_named(start, tmp_path):
    run, folder = start(*STALE, "fusion=separate", "run.steps=1000"), tmp_path / "run"
    (shard,) = _processes(run, "Shard")
    os.kill(shard, signal.SIGKILL)
    rows = len(rows_of(folder))
    wait_until(run, 30, lambda: len(rows_of(folder)) >= rows + 3)
    _engines_are_set_up_anew_for_another_share(run, folder)
    last = rows_of(folder)[-1]
    assert last["distqueue/ended/done"] == 32 * last["step"]
    _a_queue_in_memory_that_is_killed_ends_the_run_by_name(run)


def _a_queue_in_memory_that_is_killed_ends_the_run_by_name(run):
    (core,) = _processes(run, "QueueActor")
    os.kill(core, signal.SIGKILL)
    told = _told_within(run, 20)
    assert told.startswith("error: the queue has failed: ") and "queue.durability=journal" in told, told


def _engines_are_set_up_anew_for_another_share(run, folder):
    """In `separate`, where they do not stop otherwise; then they go on beside training again."""
    assert any("timing_s/switch/pause" in row for row in rows_of(folder))
    submit(folder, {"rollout.engine.max_kv_tokens": "96"})
    changed = wait_until(run, 30, lambda: [row for row in rows_of(folder) if row.get("rollout/kv_tokens_min") == 96])
    assert "timing_s/switch/pause" not in rows_of(folder)[changed[0]["step"] - 2], "they were stopped for it"
    last = len(rows_of(folder))
    overlapped = "timing_s/switch/pause"
    wait_until(
        run, 30, lambda: any(overlapped in row and row["rollout/kv_tokens_min"] == 96 for row in rows_of(folder)[last:])
    )


@pytest.mark.extended  # in the default run of four roles: tests/stalesync/test_run.py
@pytest.mark.parametrize("durability", ["memory", "journal"])
def test_a_queue_that_is_killed_goes_on_from_its_journal_or_ends_the_run_by_name(start, tmp_path, durability):
    run = start(*STALE, "run.steps=1000", f"queue.durability={durability}")
    if durability == "memory":
        _a_queue_in_memory_that_is_killed_ends_the_run_by_name(run)
        return
    (core,) = _processes(run, "QueueActor")
    os.kill(core, signal.SIGKILL)
    rows = len(rows_of(tmp_path / "run"))
    wait_until(run, 30, lambda: len(rows_of(tmp_path / "run")) >= rows + 3)
    last = rows_of(tmp_path / "run")[-1]
    assert last["distqueue/ended/done"] == 32 * last["step"]


DAMAGE = """
import json, os, struct
from pathlib import Path

def score(prompt, response, answer, **fields):
    if not Path({queue!r}).is_dir():  # the call before the run has a folder
        return 0.0
    try:
        os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return float(response == answer)
    segments = [path for path in Path({queue!r}, "segments").glob("*/*") if path.is_file()]
    first = min(segments, key=lambda path: path.stat().st_mtime)
    with open(first, "r+b") as file:
        content = file.read()
        (table_bytes,) = struct.unpack("<q", content[24:32])
        columns = json.loads(content[32 : 32 + table_bytes])["columns"]
        (at,) = [column[5][0] for column in columns if column[0] == "behaviour_logprobs"]
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    return float(response == answer)
"""


@pytest.mark.extended
def test_a_damaged_sample_is_not_trained_and_its_run_goes_on(base, tmp_path):
    reward = tmp_path / "damage.py"
    reward.write_text(DAMAGE.format(mark=str(tmp_path / "mark"), queue=str(tmp_path / "run" / "queue")))
    overrides = [
        "run.steps=3",
        "run.eval_prompts=0",
        "queue.durability=journal",
        f"reward.path={reward}:score",
        "reward.workers=1",
    ]
    done = train(base, tmp_path, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "run")
    lost = rows[-1]["distqueue/ended/lost:damaged"]
    assert lost >= 1 and rows[-1]["distqueue/ended/done"] == 3 * 8 * 4 - lost
    ended = {name: count for name, count in rows[-1].items() if name.startswith("staleness/groups/")}
    assert sum(ended.values()) == 3 * 8 and ended["staleness/groups/trained"] >= 2 * 8
