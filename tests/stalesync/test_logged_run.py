"""A run that evaluates is killed and resumed: every logger has one history (`pip install -e '.[loggers]'`)."""

import json
import os
from importlib.util import find_spec

import pytest

from fusion.telemetry.run_contents import complete_checkpoints
from tests.machine import communicate
from tests.stalesync.runs import kill, rows_of, wait_until
from tests.telemetry.loggers.stores import mlflow_history, tensorboard_history, wandb_history

pytestmark = pytest.mark.loggers

STEPS = 8
NAMES = "critic/rewards/mean", "val-core/held_out/reward/mean@1", "timing_s/testing"
OPTIONS = [f"run.steps={STEPS}", "run.save_every=1", "eval.every=1", "training.lr=1e-3"]


@pytest.mark.parametrize("killed_at", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_killed_and_resumed_run_has_one_continuous_history_in_each_logger(start, tmp_path, monkeypatch, killed_at):
    for name in ("wandb", "mlflow"):
        if find_spec(name) is None:
            pytest.skip(f"pip install {name}")
    from fusion.telemetry.loggers.mlflow import mlflow_name

    for name, value in {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    folder, options = tmp_path / "run", [*OPTIONS, "run.loggers=[tensorboard,wandb,mlflow]"]
    run = start(*options)
    wait_until(run, 120, lambda: max(complete_checkpoints(folder), default=0) >= killed_at)
    kill(run)
    saved, logged = max(complete_checkpoints(folder)), {}
    assert saved < STEPS
    run = start(*options, "run.resume=true")
    out, err = communicate(run, 180)
    assert run.returncode == 0 and f"step-{saved}, step {saved}" in out, out + err
    run_id = json.loads((folder / "loggers.json").read_text())["id"]
    logged["tensorboard"] = tensorboard_history(folder / "tensorboard")
    stored = mlflow_history(folder / "mlflow.db", [mlflow_name(name) for name in NAMES])
    logged["mlflow"] = {name: stored[mlflow_name(name)] for name in NAMES}
    starts = sorted((folder / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"), key=os.path.getmtime)
    assert len(starts) == 2, "both under one id, so that `wandb sync` makes one run of them"
    logged["wandb"] = wandb_history(starts)
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for logger, history in logged.items():
        for name in NAMES:
            points = history.get(name)
            assert points, (logger, name)
            expected = {row["step"]: row[name] for row in rows}
            first = points[0][0]
            assert [step for step, _ in points if step >= 1][0] == 1 and (name != NAMES[1] or first == 0), logger
            assert {step for step, _ in points if step} == expected.keys(), (logger, name)
            last = dict(points)  # a step that was repeated has its later value
            assert last == pytest.approx({0: last[0], **expected} if first == 0 else expected, rel=1e-6), logger
    points = logged["tensorboard"][NAMES[1]]
    assert [step for step, _ in points] == list(range(STEPS + 1)), "TensorBoard forgets what was repeated"
