"""Reads back what loggers have stored, as points (step, value) by metric."""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

History = dict[str, list[tuple[int, float]]]


def tensorboard_history(folder: Path) -> History:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def mlflow_history(database: Path, names: Sequence[str]) -> History:
    """Of the only run in a database, in order of time."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    experiment = client.get_experiment_by_name("rlfusion")
    [run] = client.search_runs([experiment.experiment_id])
    found = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    return {
        name: [(one.step, one.value) for one in sorted(points, key=lambda one: (one.timestamp, one.step))]
        for name, points in found.items()
    }


def wandb_history(files: Iterable[Path]) -> History:
    """Of offline files, one after the other, by `training/global_step`."""
    history: History = {}
    for file in files:
        for row in wandb_rows(file):
            for name, value in row.items():
                history.setdefault(name, []).append((row["training/global_step"], value))
    return history


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an offline file: a log of records in blocks of 32 KiB, as LevelDB's."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            record = wandb_internal_pb2.Record.FromString(b"".join(parts))
            parts = []
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
