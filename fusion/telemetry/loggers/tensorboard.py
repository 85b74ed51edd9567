"""Write scalars with tensorboard's record writer: without a thread, flushed at every step."""

import os
import socket
import time
from collections.abc import Mapping
from types import SimpleNamespace

from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from fusion.telemetry.files import open_new, write_all
from fusion.telemetry.loggers.interface import LoggedRun


class TensorBoardLogger:
    """Write one event file in `tensorboard/`. If there are earlier ones, of a run that was resumed, TensorBoard
    forgets what they have of the first step of this one and of later ones."""

    def __init__(self, run: LoggedRun) -> None:
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._forgets = any(folder.iterdir())
        name = f"events.out.tfevents.{time.time_ns() // 10**6:013d}.{socket.gethostname()}.{os.getpid()}"
        self._fd = open_new(folder / name)
        # Not through a buffer, which would try to write again what found no space.
        self._writer = RecordWriter(SimpleNamespace(write=lambda record: write_all(self._fd, record)))
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._forgets:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=time.time(), step=step, session_log=start))
            self._forgets = False
        event = event_pb2.Event(wall_time=time.time(), step=step)
        for name, value in metrics.items():
            event.summary.value.add(tag=name, simple_value=float(value))
        self._write(event)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, event: event_pb2.Event) -> None:
        self._writer.write(event.SerializeToString())
