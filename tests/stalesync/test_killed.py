"""A synchronous run that is killed, whatever it is at, and goes on is to the bit the one that was never killed."""

import random
import signal
import time

import pytest
import torch

from tests.machine import communicate
from tests.stalesync.loop.test_saving import _whole
from tests.stalesync.runs import kill, rows_of, train, wait_until, weights_of

STEPS = 14
OPTIONS = [
    "cluster.npus=2",
    "parallel=single",
    f"run.steps={STEPS}",
    "run.save_every=1",
    "run.eval_prompts=0",
    "training.lr=1e-3",
    "algorithm.kl_coef=0.01",
]
SPENT = "timing_s/", "perf/", "save/", "memory/", "distqueue/", "rollout/length_error_mean"
"""Of this start of the run, not of what it computes: an estimate of a length also knows the siblings that have ended
by then"""


def _newest(folder):
    """The step of the last checkpoint that counts; 0: there is none."""
    return max((int(name.removeprefix("step-")) for name in _whole(folder)), default=0)


def _figures(folder):
    return [{name: value for name, value in row.items() if not name.startswith(SPENT)} for row in rows_of(folder)]


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    done = train(base, folder, *OPTIONS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.extended),
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_twice_at_staleness_0_is_bitwise_one_that_is_not(base, whole, start, tmp_path, seed):
    moment, folder, saved = random.Random(seed), tmp_path / "run", 0
    for resumed in ([], ["run.resume=true"]):
        run = start(*OPTIONS, *resumed)
        wait_until(run, 60, lambda: _newest(folder) > saved)  # noqa: B023
        time.sleep(moment.uniform(0, 0.6))
        kill(run)
        saved = _newest(folder)
        assert 0 < saved < STEPS, "it was killed under way"
    done = train(base, tmp_path, *OPTIONS, "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from" in done.stdout
    assert _figures(folder) == _figures(whole) and len(_figures(whole)) == STEPS
    assert_same_weights(folder, whole)


def assert_same_weights(folder, whole):
    ours, theirs = weights_of(folder / "hf"), weights_of(whole / "hf")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.extended
def test_sigterm_saves_after_the_step_under_way_and_the_resumed_run_is_bitwise_one_that_was_not_stopped(
    base, whole, start, tmp_path
):
    options, folder = [*OPTIONS, "run.save_every=0"], tmp_path / "run"
    run = start(*options)
    wait_until(run, 60, lambda: folder.exists() and len(rows_of_existing(folder)) >= 2)
    run.send_signal(signal.SIGTERM)
    out, err = communicate(run, 60)
    assert run.returncode == 143 and "SIGTERM: the step under way ends" in err, err
    steps, saved = len(rows_of(folder)), _newest(folder)
    assert 0 < saved == steps < STEPS, "no step was lost"
    assert f"stopped by SIGTERM: {steps} steps" in out
    assert f"continue from step {saved}: the same command with run.name=run run.resume=true" in out
    done = train(base, tmp_path, *options, "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _figures(folder) == _figures(whole)
    assert_same_weights(folder, whole)


def rows_of_existing(folder):
    return rows_of(folder) if (folder / "metrics.jsonl").exists() else []
