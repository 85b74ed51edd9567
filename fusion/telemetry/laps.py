"""What was done since the last lap, over and over: thousands of steps as a strip of at most so many pieces.

    lap  prefill prefill decode decode decode … decode prefill decode … decode wait_data
    runs [   prefill    |           decode            | p |     decode        |w]      exact, while they are few
         [   prefill    |                  decode                     | p |    w]      too many: gathered in windows

Neighbours of one kind are one run. While there are at most ``most`` runs they are exactly what was told. Beyond, runs
are gathered in windows of time, which double until it is few enough again; a window shows each of its kinds once, the
one that was under way first. What lasts as long as a window stays by itself.

Invariants:
1. The runs follow each other without a gap from the start to the last lap, and neighbours differ in kind.
2. The nanoseconds of each kind are those that were told, exactly, however coarse the runs are.
3. There are at most ``most`` runs, if there are no more kinds than that.
4. From the start to any instant, the runs count of a kind what was told of it by then, give or take `blur_ns`.
"""

from __future__ import annotations

from typing import NamedTuple

MOST = 100
"""Runs of a strip. One an engine step would be thousands a stage; what lasts a twentieth of it stays where it was."""

FIRST_WINDOW_NS = 1_000_000


class Run(NamedTuple):
    kind: str
    start_ns: int
    end_ns: int


class Laps:
    """A strip that starts at ``start_ns``. No clock of its own; a lap costs the same however many there were."""

    def __init__(self, start_ns: int, most: int = MOST):
        self._start_ns = self._last_ns = start_ns
        self._most = most
        self._window_ns = 0
        self._runs: list[tuple[str, int]] = []
        self._window: dict[str, int] = {}
        """Nanoseconds by kind of the window under way, in the order in which they came"""
        self._filled_ns = 0

    @property
    def blur_ns(self) -> int:
        """How much of a kind may be shown earlier or later than it was; 0: nothing was gathered."""
        # A window holds less than two of its lengths, and the lengths before it are a half, a quarter, … of it.
        return 4 * self._window_ns

    def lap(self, kind: str, now_ns: int) -> None:
        """From the last lap until now it was ``kind``."""
        length = now_ns - self._last_ns
        if length <= 0:
            assert not length, f"lap {kind}: {-length} ns before the last one"
            return
        self._last_ns = now_ns
        self._take(kind, length)
        if len(self._runs) > self._most:
            self._coarsen()

    def runs(self) -> list[Run]:
        """From the start to the last lap. It ends the window under way."""
        self._end_window()
        if len(self._runs) > self._most:
            self._coarsen()
        found, start = [], self._start_ns
        for kind, length in self._runs:
            found.append(Run(kind, start, start + length))
            start += length
        return found

    def _take(self, kind: str, length: int) -> None:
        if length >= self._window_ns:
            self._end_window()
            self._append(kind, length)
            return
        window = self._window
        window[kind] = window.get(kind, 0) + length
        self._filled_ns += length
        if self._filled_ns >= self._window_ns:
            self._end_window()

    def _end_window(self) -> None:
        window = self._window
        if self._runs and (going_on := self._runs[-1][0]) in window:
            self._append(going_on, window.pop(going_on))
        for kind, length in window.items():
            self._append(kind, length)
        window.clear()
        self._filled_ns = 0

    def _append(self, kind: str, length: int) -> None:
        if self._runs and self._runs[-1][0] == kind:
            length += self._runs.pop()[1]
        self._runs.append((kind, length))

    def _coarsen(self) -> None:
        while len(self._runs) > self._most:
            self._end_window()
            told, self._runs = self._runs, []
            self._window_ns = 2 * self._window_ns or FIRST_WINDOW_NS
            for kind, length in told:
                self._take(kind, length)
            self._end_window()
            if sum(length for _, length in self._runs) < self._window_ns:
                return  # more kinds than runs are allowed
