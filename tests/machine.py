"""Stretch the deadlines of the tests to the speed and the load of this machine.

Every number of seconds in the tests is stated for the reference machine: two idle cores of an AMD EPYC (Zen 3, 2.45
GHz) under CPython 3.11, where one call of `reference_loop` takes `REFERENCE_S` of CPU time. On another machine, or
beside other work, the same wait may take longer for no fault of the code. So a test never compares a clock with a
number, it asks here:

    patience(20)                     seconds to wait here and now for what takes at most 20 s there
    within(took_s, 15)               whether a measured duration is within a bound of 15 s there
    cpu_within(took_s, 8)            the same for CPU seconds, which other processes hardly lengthen
    Deadline(60).expired()           of a loop that polls
    wait_for(lambda: …, 60)          polls until it is true
    run(command, 180), communicate(process, 60)   of a subprocess

Two factors, neither ever below 1: how much longer the loop computes than on the reference machine, and how crowded the
machine is: the larger of wall time over CPU time of the loop and of the load average per core. Both are measured at the
first use in a process; the load average is read at every use, and before anything is declared late the loop is measured
again, as load may have come in the meantime.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

REFERENCE_S = 0.011
"""CPU seconds of one call of `reference_loop` on the reference machine."""

MAX_STRETCH = 30.0
"""A machine that is slower than this is not waited for: a test that hangs must end."""

Value = TypeVar("Value")


def reference_loop() -> int:
    """Computes what an interpreter mostly does: integers, a table, a branch."""
    total, table = 0, {}
    for number in range(100_000):
        table[number & 255] = total
        total = (total * 31 + number) % 1_000_003
    return total


@dataclass(frozen=True)
class Speed:
    """How this machine compares with the reference machine.

    Attributes:
        slowness: CPU time of the reference loop over `REFERENCE_S`.
        crowding: wall time of the loop over its CPU time: 3 where it had a third of a core.
    """

    slowness: float
    crowding: float

    @classmethod
    def measure(cls, least_s: float = 0.15) -> Speed:
        """Runs the loop for ``least_s`` of wall time: long enough that the scheduler's favour for a process that has
        just woken up is spent."""
        start_s, start_cpu_s, calls = time.perf_counter(), time.thread_time(), 0
        while time.perf_counter() - start_s < least_s or calls < 4:
            reference_loop()
            calls += 1
        wall_s, cpu_s = time.perf_counter() - start_s, time.thread_time() - start_cpu_s
        return cls(cpu_s / calls / REFERENCE_S, wall_s / cpu_s)

    def stretch(self, load: float) -> float:
        """The factor for a deadline, where ``load`` processes per core want to run; 1 to `MAX_STRETCH`."""
        return min(MAX_STRETCH, max(1.0, self.slowness) * max(1.0, self.crowding, load))


class Machine:
    """The speed that was measured last, and what it does to a deadline.

    ``measure`` and ``load`` are replaced by the tests of this file.
    """

    def __init__(self, measure: Callable[[], Speed] = Speed.measure, load: Callable[[], float] | None = None) -> None:
        self._measure, self._load = measure, load or load_per_core
        self._first: Speed | None = None
        self._last: Speed | None = None

    @property
    def speed(self) -> Speed:
        if self._last is None:
            self._first = self._last = self._measure()
        return self._last

    def patience(self, seconds: float) -> float:
        return seconds * self.speed.stretch(self._load())

    def cpu_patience(self, seconds: float) -> float:
        return seconds * max(1.0, min(MAX_STRETCH, self.speed.slowness))

    def measure_again(self) -> None:
        """Slowness never falls below that of the start: a core that clocks up for a moment shortens nothing."""
        first, again = self._first or self.speed, self._measure()
        self._last = Speed(max(first.slowness, again.slowness), again.crowding)

    def within(self, took_s: float, seconds: float) -> bool:
        if took_s <= self.patience(seconds):
            return True
        self.measure_again()
        return took_s <= self.patience(seconds)

    def cpu_within(self, took_s: float, seconds: float) -> bool:
        if took_s <= self.cpu_patience(seconds):
            return True
        self.measure_again()
        return took_s <= self.cpu_patience(seconds)


def load_per_core() -> float:
    """Processes that wanted to run, averaged over the last minute, per core; 0 where the system does not say."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


MACHINE = Machine()
patience, within, cpu_within = MACHINE.patience, MACHINE.within, MACHINE.cpu_within


class Deadline:
    """The end of a wait of at most ``seconds`` on the reference machine."""

    def __init__(self, seconds: float, machine: Machine = MACHINE, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._machine, self._clock = seconds, machine, clock
        self._start_s = clock()

    @property
    def waited_s(self) -> float:
        return self._clock() - self._start_s

    def left_s(self) -> float:
        """Seconds to the end as the machine is now, at least 0; a wait that took them all asks `expired`."""
        return max(0.0, self._machine.patience(self.seconds) - self.waited_s)

    def expired(self) -> bool:
        return not self._machine.within(self.waited_s, self.seconds)

    def __str__(self) -> str:
        return f"{self.seconds:g} s of the reference machine, {self.waited_s:.1f} s here"


def wait_for(reached: Callable[[], Value], seconds: float, every_s: float = 0.02) -> Value:
    """Polls ``reached`` until it returns something true, and returns that.

    Raises:
        TimeoutError: it did not within ``seconds`` of the reference machine.
    """
    deadline = Deadline(seconds)
    while not (found := reached()):
        if deadline.expired():
            raise TimeoutError(f"not reached in {deadline}")
        time.sleep(every_s)
    return found


def communicate(process: subprocess.Popen, timeout_s: float) -> tuple[Any, Any]:
    """`Popen.communicate` with a stretched timeout.

    Raises:
        subprocess.TimeoutExpired: with what the process has written; it runs on.
    """
    deadline = Deadline(timeout_s)
    while True:
        try:
            return process.communicate(timeout=max(1.0, deadline.left_s()))
        except subprocess.TimeoutExpired:
            if deadline.expired():
                raise


def run(command: list[str], timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of text with captured output and a stretched timeout."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | options
    with subprocess.Popen(command, **pipes) as process:
        try:
            out, err = communicate(process, timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def running(pid: int) -> bool:
    """Whether a process runs: it exists, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it has ended, or ends while it is read
        return False
