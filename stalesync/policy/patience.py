"""Decide, while something is awaited, when to report that it is late and when to stop waiting. Pure: time is passed in.

Invariants: it stops only when more than ``limit_s`` have passed since the beginning; until then it warns once whenever
more than ``warn_every_s`` have passed since the beginning or the last warning."""

from typing import Literal

Decision = Literal["wait", "warn", "stop"]


class Patience:
    """Begin to wait at ``now_s``."""

    def __init__(self, now_s: float, *, limit_s: float, warn_every_s: float):
        self.begun_s = self._warned_s = now_s
        self.limit_s, self._warn_every_s = limit_s, warn_every_s

    def observe_waiting(self, now_s: float) -> Decision:
        """Return what to do at ``now_s``, when it has not arrived yet."""
        if now_s - self.begun_s > self.limit_s:
            return "stop"
        if now_s - self._warned_s > self._warn_every_s:
            self._warned_s = now_s
            return "warn"
        return "wait"
