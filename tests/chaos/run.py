"""Start a run, kill what the plan says at the moment it says, and observe how the run ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.plan import FILLED, Kill
from tests.chaos.space import Space, victim_of
from tests.chaos.verdict import MENDED, NAMED, Ended
from tests.warm import WarmRun

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.03
LATE_STARTS = 1.5
"""A run must have ended, or go on, within this many times the time that it takes to start: the measure of this machine
under its present load"""
HANGS_STARTS = 6.0
"""… and is killed after this many times …"""
TAKES_STARTS = 20.0
"""… or, if nothing was killed, after this many times from its start"""
WAITS_S = 40.0
"""Seconds for Ray's processes to start, as several runs start at once: more than its defaults"""


class StartedRun:
    """A run from its start to its end. ``reference_s``: seconds in which an undisturbed run starts."""

    def __init__(self, space: Space, arguments: Sequence[str], *, name: str, reference_s: float) -> None:
        self.space, self.folder = space, space.seen(space.runs / name)
        self._begin_s, self._reference_s = time.monotonic(), reference_s
        self.first_step_s: float | None = None
        """Seconds from the start of the process to the end of its first step"""
        self._step_before = self.last_step()
        self._outputs = [(space.seen(space.runs.parent) / file) for file in ("out", "err")]
        self._stat: tuple[int, int] = (-1, -1)
        self._step = 0
        self._hung, self._rows = False, 0
        self._num_mended = 0
        """Number of engines that were replaced before the last kill"""
        script, all_variables = [str(ROOT / "scripts" / "train.py"), *arguments], environment() | space.environment()
        out, err = self._outputs
        for path in self._outputs:
            path.write_bytes(b"")  # here: the run may be killed before it can
        self.process: WarmRun | subprocess.Popen
        if space.forks is not None:
            self.process = space.forks.start(
                script,
                namespace=space.namespace,
                program=space.program,
                environment=all_variables,
                out=out,
                err=err,
            )
        else:
            with out.open("w") as stdout, err.open("w") as stderr:
                command = [*space.enter, "--", sys.executable, *script]
                nothing = subprocess.DEVNULL
                self.process = subprocess.Popen(command, env=all_variables, stdin=nothing, stdout=stdout, stderr=stderr)

    @property
    def start_s(self) -> float:
        """Seconds from the start of the process to the end of the first step; if it has none yet, the reference."""
        return self._reference_s if self.first_step_s is None else max(self.first_step_s, self._reference_s)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def last_step(self) -> int:
        """Return the last step in `metrics.jsonl`, 0 before the first one."""
        try:
            steps = re.findall(rb'^\{"step": (\d+).*\n', (self.folder / "metrics.jsonl").read_bytes(), re.MULTILINE)
        except OSError:
            return 0
        return int(steps[-1]) if steps else 0

    def wait_for_step(self, step: int) -> bool:
        """Wait until this start has ended a step, and the run at least ``step`` of them; False: it has ended before."""
        reached = max(step, self._step_before + 1)
        return self._wait(lambda: self._new_steps() >= reached)

    def wait_for_victim(self, victim: str) -> bool:
        """Wait until a process of this kind has started; False: the run has ended before."""
        return victim in ("controller", *FILLED) or self._wait(lambda: bool(self._pids(victim)))

    def await_moment(self, kill: Kill) -> bool:
        """Wait until it is time to kill; False: the run has ended before."""
        if not (self.wait_for_victim(kill.victim) if kill.step is None else self.wait_for_step(kill.step)):
            return False
        until_s = (self._begin_s if self._counts_from_start(kill) else time.monotonic()) + kill.delay_s
        while self.running and time.monotonic() < until_s:
            time.sleep(min(POLL_S, max(0.0, until_s - time.monotonic())))
        return self.running

    def strike(self, kill: Kill) -> tuple[bool, int | None]:
        """Kill or fill. Return whether the victim was there, and the rank if it is a worker that has one."""
        self._rows = self._new_steps()
        self._num_mended = self.count_mended()
        if kill.filled:
            self.space.fill(kill.victim)
            return True, None
        pids = [self.process.pid] if kill.victim == "controller" else self._pids(kill.victim)
        if not pids:
            return False, None
        pid = sorted(pids)[int(kill.pick * len(pids))]
        rank = self._rank_of(pid) if kill.victim == "worker" else None
        try:
            os.kill(pid, getattr(signal, kill.signal))
        except ProcessLookupError:
            return False, None
        return True, rank

    def wait_for_end(self, limit_s: float | None = None) -> int | None:
        """Wait for the end of the controller; return its exit status, None if it had to be killed after ``limit_s``."""
        self._wait(lambda: False, TAKES_STARTS * self.start_s if limit_s is None else limit_s)
        if (status := self.process.poll()) is None:
            self.space.clear({*self.space.commands()})
            self.process.wait()
            self._hung = True
        return None if self._hung else status

    def observe_end(self, kill: Kill, rank: int | None) -> Ended:
        """Wait for the end of all processes of a run that was struck, or has ended by itself."""
        struck_s = time.monotonic()
        status = self.wait_for_end(HANGS_STARTS * self.start_s)
        if kill.filled:
            self.space.free(kill.victim)
        until_s = time.monotonic() + LATE_STARTS * self.start_s
        while (left := self.space.commands()) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return self.describe(kill, status, rank=rank, seconds=time.monotonic() - struck_s, left=tuple(left.values()))

    def observe_survival(self, kill: Kill, rank: int | None = None, mended: bool = False) -> Ended:
        """Wait until a run that was struck has ended two more steps, the one in progress and another, or has ended. A
        disk that was filled is freed when the run has warned: the rows of its steps are written then."""
        struck_s, rows = time.monotonic(), self.last_step()
        if kill.filled:
            warned = re.compile(NAMED[kill.victim], re.MULTILINE)
            self._wait(lambda: bool(warned.search(self._outputs[1].read_text(errors="replace"))), self.start_s)
            self.space.free(kill.victim)
        went_on = self._wait(lambda: self.last_step() >= rows + 2, HANGS_STARTS * self.start_s)
        seconds = time.monotonic() - struck_s
        status = 0 if went_on else self.wait_for_end(0.0)
        return self.describe(kill, status, rank=rank, seconds=seconds, mended=mended)

    def observe_worker(self, kill: Kill, rank: int | None) -> Ended:
        """Wait for the end of a run whose worker was struck, or until it goes on because an engine is replaced."""
        self._wait(lambda: self.count_mended() > self._num_mended, HANGS_STARTS * self.start_s)
        mended = self.count_mended() > self._num_mended
        return self.observe_survival(kill, rank, mended=True) if mended else self.observe_end(kill, rank)

    def count_mended(self) -> int:
        """Return the number of engines that this start has replaced."""
        return len(re.findall(MENDED, self._outputs[0].read_text(errors="replace"), re.MULTILINE))

    def describe(
        self,
        kill: Kill,
        status: int | None,
        *,
        rank: int | None = None,
        seconds: float = 0.0,
        left: tuple[str, ...] = (),
        mended: bool = False,
    ) -> Ended:
        """Return what was observed."""
        out, err = (path.read_text(errors="replace") for path in self._outputs)
        ended = not self.running
        return Ended(
            kill=kill,
            launched="run folder" in out or "resuming in" in out,
            status=status,
            out=out,
            err=err,
            rows=self._rows,
            rank=rank,
            seconds=seconds,
            limit_s=LATE_STARTS * self.start_s,
            left=tuple([*left, *self.space.left_files(), *damaged_checkpoints(self.folder)]) if ended else (),
            mended=mended,
        )

    def _wait(self, reached: Callable[[], bool], limit_s: float = float("inf")) -> bool:
        """Poll until it is reached; False: the run has ended, or the limit has passed, before."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            ended = not self.running
            self._new_steps()
            if reached():
                return True
            if ended:
                return False
            time.sleep(POLL_S)
        return False

    def _new_steps(self) -> int:
        """Return the number of the last step that has ended in this start, 0 before the first one."""
        try:
            about = (self.folder / "metrics.jsonl").stat()
        except OSError:
            return 0
        if (about.st_size, about.st_mtime_ns) != self._stat:
            self._stat, rows = (about.st_size, about.st_mtime_ns), self.last_step()
            if rows > self._step_before:
                self._step = rows
                self.first_step_s = self.first_step_s or time.monotonic() - self._begin_s
            else:
                self._step_before = rows  # it has gone back to its checkpoint
        return self._step

    def _pids(self, victim: str) -> list[int]:
        return [pid for pid, command in self.space.commands().items() if victim_of(command) == victim]

    def _rank_of(self, pid: int) -> int | None:
        for path in self.folder.glob("logs/rank-*.log"):
            processes = re.findall(r"process (\d+) on ", path.read_text(errors="replace"))
            if processes and int(processes[-1]) == pid:
                return int(path.stem.removeprefix("rank-"))
        return None

    def _counts_from_start(self, kill: Kill) -> bool:
        return kill.step is None and (kill.filled or kill.victim == "controller")


def environment() -> dict[str, str]:
    """Return the environment of a run."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "LD_PRELOAD")}
    waits = ("raylet_start_wait_time_s", "gcs_server_port_wait_time_s", "worker_register_timeout_seconds")
    return inherited | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": "200",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(256 << 20),  # Ray refuses more than its share of /dev/shm
        **{f"RAY_{name}": str(round(WAITS_S)) for name in waits},
    }


def damaged_checkpoints(folder: Path) -> list[str]:
    """Return a line for each checkpoint that counts as complete and is not."""
    from fusion.telemetry.manifest import find_damage
    from fusion.telemetry.run_contents import complete_checkpoints

    damages = {path: find_damage(path) for path in complete_checkpoints(folder).values()}
    return [f"{path.name}: {damage}" for path, damage in damages.items() if damage is not None]
