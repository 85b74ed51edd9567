"""Run the processes of a stage side by side, and end them all when one fails or the time is over.

run_processes(commands, timeout_s) ──► StageOutcome: what each wrote to standard output; of the first that failed
                                                     the last line of its error and the end of all it wrote
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stalesync.smoke.report import tail

POLL_S = 0.05


@dataclass(frozen=True)
class StageOutcome:
    """``texts``: standard output of each process; ``error``: "" if all succeeded."""

    texts: Sequence[str] = field(default_factory=list)
    error: str = ""
    output: str = ""

    def answers(self) -> list[dict[str, Any]]:
        """Return the JSON object in the last line of each text; {} where there is none."""
        return [_answer(_last_line(text)) for text in self.texts]


def run_processes(
    commands: Sequence[Sequence[str]], *, timeout_s: float, cwd: Path, variables: Mapping[str, str]
) -> StageOutcome:
    """Run the commands at the same time, each in a process group of its own, which ends with this call. ``variables``:
    of their environment, unless it has them."""
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(len(commands))]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for command, (output, errors) in zip(commands, files, strict=True):
                running.append(_start(command, output, errors, cwd=cwd, variables=variables))
            failed, why = _wait(running, timeout_s)
        finally:
            for process in running:
                _end(process)
        texts = [output.read_text(errors="replace") for output, _ in files]
        if failed is None:
            return StageOutcome(texts)
        errors_text = files[failed][1].read_text(errors="replace")
    why = why or _last_line(errors_text) or _last_line(texts[failed]) or "failed without a message"
    rank = f"rank {failed}: " if len(commands) > 1 else ""
    return StageOutcome(texts, f"{rank}{why}", tail(f"{texts[failed]}\n{errors_text}"))


def _start(
    command: Sequence[str], output: Path, errors: Path, *, cwd: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env={**variables, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def _wait(running: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> tuple[int | None, str]:
    """Return the rank of the first process that failed, and why if a signal or the time ended it; else (None, "")."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in running]
        for rank, code in enumerate(codes):
            if code:
                return rank, f"ended by {signal.Signals(-code).name}" if code < 0 else ""
        if None not in codes:
            return None, ""
        if time.monotonic() > deadline:
            return codes.index(None), f"did not end within {timeout_s:.0f} s"
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what it has started
    process.wait()


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[-1:]), "")


def _answer(line: str) -> dict[str, Any]:
    try:
        read = json.loads(line)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
