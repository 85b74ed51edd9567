"""Log to MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are read; without a URI, the run's folder is used."""

import os
import re
import time
from collections.abc import Iterator, Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.utils.async_logging.run_operations import RunOperations

from fusion.telemetry.loggers.interface import PROJECT, LoggedRun
from fusion.telemetry.page.settings import flatten

TAG = "rlfusion.id"
"""Tag of the run's id, by which a resumed run finds its own."""
MAX_METRICS, MAX_PARAMS = 1000, 100
"""Maximum numbers of a request, by MLflow's interface"""
MAX_PARAM_CHARACTERS = 500

REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that the name of a metric may not have"""


class MlflowLogger:
    """Keep one run of MLflow over all starts of a run, by a tag. A step is written while the next one runs; an error
    of that is raised by the next call."""

    def __init__(self, run: LoggedRun) -> None:
        self._writing: list[RunOperations] = []
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), run)
        known = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if known:
            self._run_id = known[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = self._client.create_run(experiment, tags={TAG: run.id}, run_name=run.name).info.run_id
        params = [Param(key, value[:MAX_PARAM_CHARACTERS]) for key, value in flatten(run.config).items()]
        for some in _chunks(params, MAX_PARAMS):
            self._client.log_batch(self._run_id, params=some)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = time.time_ns() // 10**6
        values = [Metric(mlflow_name(name), float(value), now_ms, step) for name, value in metrics.items()]
        self._wait()
        for some in _chunks(values, MAX_METRICS):
            written = self._client.log_batch(self._run_id, metrics=some, synchronous=False)
            assert written is not None  # as it is not synchronous
            self._writing.append(written)

    def close(self) -> None:
        try:
            self._wait()
        finally:
            self._client.set_terminated(self._run_id)

    def _wait(self) -> None:
        while self._writing:
            self._writing.pop(0).wait()

    def _experiment(self, name: str, run: LoggedRun) -> str:
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return known.experiment_id
        local = not os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = (run.folder.resolve() / "mlflow").as_uri() if local else None
        return self._client.create_experiment(name, artifact_location=artifacts)


def mlflow_name(metric: str) -> str:
    """Return the name of a metric as MLflow accepts it: `@` is `_at_`, as in verl, and other characters that it
    refuses are underscores."""
    return REFUSED.sub("_", metric.replace("@", "_at_"))


def _chunks(values: list, size: int) -> Iterator[list]:
    return (values[start : start + size] for start in range(0, len(values), size))
