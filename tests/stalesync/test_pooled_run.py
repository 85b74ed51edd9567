"""Whole runs whose engines share one KV pool: bit by bit those without chunks, and nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress

import pytest
import torch

from distqueue.payload.sweep import LOCK, NodeProcess, memory
from tests.stalesync.runs import assert_gone, descendants, rows_of, train, wait_until, weights_of

OPTIONS = """cluster.npus=2 parallel=single run.steps=3 run.eval_prompts=0 training.lr=1e-3
rollout.max_response_length=48 rollout.sampling.forced_median=24 rollout.engine.batch_invariant=true""".split()
POOL = """rollout.kv_pool.suspended=pool rollout.schedule.chunk_tokens=8 rollout.kv_pool.pull_tokens=8
rollout.kv_pool.spread=1""".split()
SAMPLED = ("critic/", "actor/", "training/", "response_length/")
"""Prefixes of the metrics that depend on samples, rewards and log-probabilities, and on nothing else"""


def _pools():
    return {*memory().glob("distqueue-kv-*")}


def _left(before):
    """Folders that a run has left: those of runs beside this test are locked by living processes."""
    return [folder for folder in _pools() - before if not _is_used(folder)]


def _is_used(folder):
    for _ in range(10):
        with suppress(FileNotFoundError, ValueError):  # just locked, or just removed
            owners = [NodeProcess(*json.loads(lock.read_text())) for lock in folder.glob(f"*{LOCK}")]
            if owners or not folder.exists():
                return not owners or not all(owner.is_dead() for owner in owners)
        time.sleep(0.1)
    return False


@pytest.mark.extended
def test_chunks_behind_pooled_kv_are_bitwise_the_run_without_chunks(base, tmp_path):
    before = _pools()
    for name, options in (("plain", []), ("pooled", POOL)):
        done = train(base, tmp_path, f"run.name={name}", *OPTIONS, *options)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not _left(before), "nothing is left in shared memory"
    plain, pooled = (rows_of(tmp_path / name) for name in ("plain", "pooled"))
    for one, other in zip(plain, pooled, strict=True):
        names = [name for name in one if name.startswith(SAMPLED)]
        assert [one[name] for name in names] == [other[name] for name in names] and len(names) > 10
    ours, theirs = (weights_of(tmp_path / name / "hf") for name in ("plain", "pooled"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    figures = "hits", "pulls", "misses", "damaged", "evictions", "bytes", "s"
    counts = {name: sum(row[f"rollout/kv_pool_{name}"] for row in pooled) for name in figures}
    assert counts["hits"] + counts["pulls"] > 20 and counts["bytes"] > 0
    assert counts["damaged"] == counts["evictions"] == 0
    assert "rollout/kv_pool_hits" not in plain[0]


@pytest.mark.extended
def test_engines_whose_cards_train_leave_their_kv_to_the_others(base, tmp_path):
    before, spill = _pools(), tmp_path / "spill"
    hybrid = ["fusion=hybrid", "stalesync.max_staleness=2", f"rollout.kv_pool.spill={spill}"]
    done = train(base, tmp_path, *OPTIONS, *POOL, *hybrid, "run.steps=6", "rollout.kv_pool.max_parked_mib=1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "run")
    counts = {name: sum(row.get(f"rollout/kv_pool_{name}", 0) for row in rows) for name in ("pulls", "damaged")}
    assert counts["pulls"] > 0 == counts["damaged"]
    assert rows[-1]["distqueue/rows"] == 0
    assert not _left(before) and not [*spill.iterdir()]


@pytest.mark.extended
@pytest.mark.parametrize("victim", ["worker", "controller"])
def test_a_killed_run_leaves_no_kv(base, start, tmp_path, victim):
    before = _pools()
    long = ["rollout.max_response_length=200", "rollout.sampling.forced_median=100", "run.steps=1000"]
    run = start(*OPTIONS, *POOL, *long)
    wait_until(run, 60, lambda: any([*folder.glob("files/*")] for folder in _pools() - before))
    below = descendants(run.pid)
    cards = [pid for pid, command in below.items() if "ray::Card" in command]
    os.kill(run.pid if victim == "controller" else cards[0], signal.SIGKILL)
    run.communicate()
    assert_gone(below, within_s=30)
    assert not _left(before)
