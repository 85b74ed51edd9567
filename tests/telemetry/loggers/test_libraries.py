"""Each logger with its own library, offline: `pip install -e '.[loggers]'`, `pytest -m loggers`."""

import json
import math
import os
import sqlite3
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.machine import run
from tests.telemetry.loggers.stores import wandb_history

pytestmark = pytest.mark.loggers

START = """
import sys
from pathlib import Path
from fusion.telemetry import RunFolder
from fusion.telemetry.loggers import find_loggers
name, root, first, last, factor = sys.argv[1], Path(sys.argv[2]), *map(float, sys.argv[3:])
with RunFolder(root, "run", "resume") as folder:
    folder.open_loggers(find_loggers([name]), {"run": {"name": "run", "steps": 4}, "training": {"betas": [0.9, 0.99]}})
    folder.rewind(int(first) - 1)
    for step in range(int(first), int(last) + 1):
        metrics = {"critic/rewards/mean": factor * step, "memory/infer/kv_mib": 2.0, "actor/pg_loss": float("nan")}
        folder.log(step, metrics | {"val-core/held_out/reward/mean@1": factor})
    assert folder.notes == [], folder.notes
"""

Points = list[tuple[int, float]]


def log_in_two_starts(name, root, environment):
    """Steps 1 to 3, then a resumed run that repeats step 3 and goes on to step 4 with values ten times as high."""
    if find_spec(name) is None:
        pytest.skip(f"pip install {name}")
    variables = os.environ | {"HOME": str(root), "DO_NOT_TRACK": "1"} | environment
    for arguments in (("1", "3", "1"), ("3", "4", "10")):
        command = [sys.executable, "-c", START, name, str(root), *arguments]
        done = run(command, 180, env=variables, text=True)
        assert done.returncode == 0
    return root / "run"


def test_mlflow_has_one_run_with_the_history_of_both_starts(tmp_path):
    folder = log_in_two_starts("mlflow", tmp_path, {"MLFLOW_TRACKING_URI": ""})
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rlfusion")
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "run" and found.info.status == "FINISHED"
    assert found.data.params["training.betas"] == "[0.9, 0.99]" and found.data.params["run.steps"] == "4"
    history = client.get_metric_history(found.info.run_id, "critic/rewards/mean")
    assert sorted((one.step, one.value) for one in history) == [(1, 1), (2, 2), (3, 3), (3, 30), (4, 40)]
    assert found.data.metrics["critic/rewards/mean"] == 40
    assert found.data.metrics["val-core/held_out/reward/mean_at_1"] == 10, "its name as MLflow accepts it"
    assert math.isnan(client.get_metric_history(found.info.run_id, "actor/pg_loss")[0].value)


def test_wandb_has_both_starts_under_one_id_with_the_runs_own_steps(tmp_path):
    folder = log_in_two_starts("wandb", tmp_path, {"WANDB_MODE": "offline"})
    run_id = json.loads((folder / "loggers.json").read_text())["id"]
    files = sorted((folder / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"), key=os.path.getmtime)
    found = [wandb_history([file])["critic/rewards/mean"] for file in files]
    assert found == [[(1, 1), (2, 2), (3, 3)], [(3, 30), (4, 40)]]


def test_swanlab_has_both_starts_under_one_id(tmp_path):
    folder = log_in_two_starts("swanlab", tmp_path, {"SWANLAB_MODE": "local"})
    run_id = json.loads((folder / "loggers.json").read_text())["id"]
    starts = sorted((folder / "swanlab").glob(f"run-*-{run_id}"))
    curves = [[swanlab_points(file) for file in start.glob("logs/*/*.log")] for start in starts]
    assert len(starts) == 2 and [(1, 1), (2, 2), (3, 3)] in curves[0] and [(3, 30), (4, 40)] in curves[1]
    assert all(b"critic/rewards/mean" in next(start.glob("*.swanlab")).read_bytes() for start in starts)


def swanlab_points(path: Path) -> Points:
    rows = map(json.loads, path.read_text().splitlines())
    return [(row["index"], row["data"]) for row in rows]


def test_trackio_has_one_run_with_the_history_of_both_starts(tmp_path):
    folder = log_in_two_starts("trackio", tmp_path, {"TRACKIO_DIR": str(tmp_path / "trackio")})
    run_id = json.loads((folder / "loggers.json").read_text())["id"]
    with sqlite3.connect(tmp_path / "trackio" / "rlfusion.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert {name for name, *_ in rows} == {f"run-{run_id[:8]}"}
    points = [(step, json.loads(metrics)["critic/rewards/mean"]) for _, step, metrics in rows]
    assert points == [(1, 1), (2, 2), (3, 3), (3, 30), (4, 40)]
