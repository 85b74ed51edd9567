"""Profile what one thread runs on a card, with torch's profiler or, on Ascend, with torch_npu's."""

import logging
import os
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


class Profile:
    """Profile the thread that creates it until `close`, which must be called on the same thread. ``kind``: of the
    device (`Device.kind`). An emulated card computes on the CPU, which is what is recorded then. ``path``: without a
    suffix. The trace is PATH.json, which https://ui.perfetto.dev opens; on Ascend it is the folder PATH with the
    results of msprof, which MindStudio Insight opens."""

    def __init__(self, kind: str, path: Path) -> None:
        self._path, self._kind = path, kind
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler = _profiler(kind, path)
        self._profiler.start()

    def close(self) -> None:
        """Stop and write the trace. One that is cut off, because the disk is full for example, is removed, with a
        warning: torch reports no error."""
        self._profiler.stop()
        if self._kind != "npu":  # there `stop` has written it
            partial = self._path.with_name(f".{self._path.name}.json")
            self._profiler.export_chrome_trace(str(partial))
            if _is_whole(partial):
                os.replace(partial, self._path.with_name(f"{self._path.name}.json"))
            else:
                for left in (partial, partial.with_name(f"{partial.name}.tmp")):  # the second while torch writes
                    left.unlink(missing_ok=True)
                log.warning("%s.json could not be written, or not whole; is the disk full?", self._path)


def _is_whole(trace: Path) -> bool:
    """Return whether a file ends as a JSON object does."""
    try:
        with trace.open("rb") as file:
            file.seek(max(0, trace.stat().st_size - 64))
            return file.read().rstrip().endswith(b"}")
    except FileNotFoundError:
        return False


def _profiler(kind: str, path: Path) -> Any:
    if kind == "npu":
        import torch_npu

        profiler, activity = torch_npu.profiler, torch_npu.profiler.ProfilerActivity
        return profiler.profile(
            activities=[activity.CPU, activity.NPU], on_trace_ready=profiler.tensorboard_trace_handler(str(path))
        )
    activity = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if kind == "cuda" else [])])
