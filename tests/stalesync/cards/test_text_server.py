"""Engines that exchange text for drafts, in whole runs: the same samples, and only speed depends on the exchange."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.machine import communicate
from tests.stalesync.runs import assert_gone, descendants, rows_of, train, wait_until
from tests.stalesync.test_ports import check_ports

TWO = ["cluster.npus=2", "parallel=single", "run.eval_prompts=0", "rollout.max_response_length=32", "data.rows=8"]
TWO += [
    "rollout.sampling.forced_median=32",
    "rollout.engine.batch_invariant=true",
    "rollout.schedule.chunk_tokens=16",
    "training.lr=1e-3",
]
DRAFTS = [
    "rollout.drafts.source=both",
    "rollout.drafts.tree=2",
]  # which never refuses a draft


def samples_of(run):
    """Step, prompt, response and reward of every sample, in the order of the data."""
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return sorted((row["step"], row["prompt"], row["response"], row["reward"]) for row in rows)


def servers_below(pid):
    return [below for below, command in descendants(pid).items() if "ray::TextServer" in command]


@pytest.mark.extended
@pytest.mark.parametrize("other", ["none", "alone"])
def test_two_engines_sample_the_same_with_the_text_of_each_other(other, base, tmp_path):
    """As without drafts, and as with drafts from each engine's own text."""
    found = {}
    options = {"none": [], "alone": [*DRAFTS, "rollout.drafts.exchange=false"], "exchange": DRAFTS}
    for name in (other, "exchange"):
        done = train(base, tmp_path, f"run.name={name}", "run.steps=3", *TWO, *options[name])
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = samples_of(tmp_path / name), rows_of(tmp_path / name)
    (samples, rows), (others_samples, others_rows) = found["exchange"], found[other]
    assert samples == others_samples
    for figure in ("actor/pg_loss", "actor/grad_norm"):
        assert [row[figure] for row in rows] == [row[figure] for row in others_rows], figure
    totals = {name: sum(row[f"rollout/draft_{name}"] for row in rows) for name in (
        "read_tokens", "sent_tokens", "sent_bytes", "received_bytes", "exchange_failures"
    )}  # fmt: skip
    assert totals["read_tokens"] > 0 and totals["exchange_failures"] == 0, totals
    assert 0 < totals["sent_bytes"] < 40 * totals["sent_tokens"], totals
    assert not any("sent_bytes" in figure for figure in others_rows[0])


@pytest.mark.extended
def test_a_text_server_that_is_killed_changes_nothing_and_is_reported_once(start, tmp_path):
    run = start(*TWO, *DRAFTS, "run.steps=1000")
    folder = tmp_path / "run"
    check_ports(run)
    (server,) = servers_below(run.pid)
    os.kill(server, signal.SIGKILL)

    def lost_at():
        return [row["step"] for row in rows_of(folder) if row["rollout/draft_exchange_failures"]]

    wait_until(run, 60, lambda: sum(row["rollout/draft_exchange_failures"] for row in rows_of(folder)) == 2)
    step = lost_at()[-1]
    wait_until(run, 60, lambda: any(row["rollout/drafted_tokens"] for row in rows_of(folder) if row["step"] > step + 1))
    below = descendants(run.pid)
    run.send_signal(signal.SIGINT)
    out, err = communicate(run, 60)
    assert run.returncode == 130 and "Traceback" not in err, err
    assert out.count("the server of the engines' text has ended") >= 1
    for rank in range(2):
        log = (folder / "logs" / f"rank-{rank}.log").read_text()
        assert log.count("no text of other engines from now on") == 1
    assert_gone(below)


@pytest.mark.extended
def test_the_history_of_prompts_survives_a_resume_with_other_engines(base, tmp_path):
    """Of a checkpoint without it, a run resumes, too."""
    common = [
        "run.eval_prompts=0",
        "rollout.max_response_length=64",
        "rollout.sampling.forced_median=64",
        "data.rows=8",
    ]
    history = ["rollout.drafts.source=history", "rollout.drafts.exchange=false"]
    for step, options in enumerate(([], history, [*history, "cluster.npus=2", "parallel=single"]), 1):
        resume = [f"run.steps={step}", f"run.resume={str(step > 1).lower()}"]
        done = train(base, tmp_path, *common, *options, *resume)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("resuming from" in done.stdout) == (step > 1)
        files = sorted(path.name for path in (tmp_path / "run" / "checkpoints" / f"step-{step}").glob("drafts/*"))
        assert files == [[], ["rank-00000.bin"], ["rank-00000.bin", "rank-00001.bin"]][step - 1]
    rows = rows_of(tmp_path / "run")
    assert ["rollout/draft_acceptance_history" in row for row in rows] == [False, False, True]
