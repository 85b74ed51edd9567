"""Two runs with the defaults of a deployment are bit by bit the same at staleness 0, whatever `auto` becomes."""

import json

import pytest
import torch

from stalesync.job.automatic import LONG
from tests.helpers import runnable_checkpoint
from tests.stalesync.runs import rows_of, train, weights_of

SAMPLED = ("critic/", "actor/", "training/", "response_length/")
"""Prefixes of the metrics that depend on samples, rewards and log-probabilities, and on nothing else"""
COMMON = "cluster.npus=2 run.steps=3 run.eval_prompts=0 training.lr=1e-3".split()
REPEATS = [f"rollout.max_response_length={LONG}", "rollout.sampling.forced_median=150", "data.prompts_per_step=2"]


def _sampled(run):
    rows = [{name: value for name, value in row.items() if name.startswith(SAMPLED)} for row in rows_of(run)]
    assert len(rows) == 3 and len(rows[0]) > 10
    return rows, [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def _same_twice(model, folder, *options):
    for name in ("one", "again"):
        done = train(model, folder, f"run.name={name}", *COMMON, *options)
        assert done.returncode == 0, done.stdout + done.stderr
    one, again = folder / "one", folder / "again"
    assert _sampled(one) == _sampled(again)
    ours, theirs = weights_of(one / "hf"), weights_of(again / "hf")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return done.stdout, rows_of(again)


@pytest.mark.extended
@pytest.mark.parametrize("deployment", ["colocated", "separate", "full", "hybrid"])
def test_two_runs_of_a_deployments_defaults_are_bitwise_the_same(base, tmp_path, deployment):
    told, rows = _same_twice(base, tmp_path, f"fusion={deployment}")
    assert "resolved from auto: rollout.schedule.chunk_tokens=null rollout.drafts.source=none" in told
    assert not any(row["rollout/chunks_total"] for row in rows)


@pytest.mark.extended
def test_so_are_two_with_long_responses_that_do_not_depend_on_batches_with_chunks_and_drafts(tmp_path):
    model = runnable_checkpoint(tmp_path / "model", max_position_embeddings=2 * LONG)
    told, rows = _same_twice(model, tmp_path, *REPEATS, "rollout=batch_invariant")
    assert f"resolved from auto: rollout.schedule.chunk_tokens={LONG // 8} rollout.drafts.source=both" in told
    assert all(row["rollout/chunks_total"] for row in rows)
    assert "rollout/drafted_tokens" in rows[0]
