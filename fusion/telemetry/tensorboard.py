"""Write scalars with tensorboard's record writer: without a thread, flushed at every step."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path


class ScalarEvents:
    """One event file in `folder`. `restart_at` (a step) makes TensorBoard forget that step and later ones of earlier
    files."""

    def __init__(self, folder: Path | str, restart_at: int | None = None) -> None:
        # Slow to import, and only the one process that writes needs it.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**6:013d}.{socket.gethostname()}.{os.getpid()}"
        self._event = event_pb2.Event
        self._file = open(Path(folder) / name, "wb")
        self._writer = RecordWriter(self._file)
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if restart_at is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=time.time(), step=restart_at, session_log=start))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        event = self._event(wall_time=time.time(), step=step)
        for name, value in figures.items():
            event.summary.value.add(tag=name, simple_value=float(value))
        self._write(event)

    def close(self) -> None:
        self._file.close()

    def _write(self, event) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()
