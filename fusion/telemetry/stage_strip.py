"""Record a stage's kinds of work as a strip of bounded length, for any number of steps.

    mark  prefill prefill decode decode decode … decode prefill decode … decode wait_data
    runs  [   prefill    |           decode            | p |     decode        |w]      exact, while they are few
          [   prefill    |                  decode                     | p |    w]      too many: merged in windows

Adjacent marks of one kind are merged to one run. Up to ``max_runs`` runs are recorded exactly. Above that, runs are
merged within windows of time, whose length doubles until the strip is short enough; a window has one run per kind, in
the order of their first occurrence, beginning with the kind of the run before it. A run as long as a window is kept
unmerged.

Invariants:
1. The runs follow each other without a gap from the start to the last mark, and neighbours differ in kind.
2. The nanoseconds of each kind are those marked, exactly, however coarse the runs are.
3. There are at most ``max_runs`` runs, if there are no more kinds than that.
4. From the start to any instant, the runs count of a kind what was marked of it by then, within `blur_ns`."""

from typing import NamedTuple

MAX_RUNS = 100
"""Maximum number of runs of a strip. One per engine step would be thousands per stage; with 100, a run that lasts a
twentieth of the stage keeps its place."""
FIRST_WINDOW_NS = 1_000_000


class StripRun(NamedTuple):
    kind: str
    start_ns: int
    end_ns: int


class StageStrip:
    """A strip that starts at ``start_ns``. It has no clock; the cost of a mark does not grow with their number."""

    def __init__(self, start_ns: int, max_runs: int = MAX_RUNS):
        self._start_ns = self._last_ns = start_ns
        self._max_runs = max_runs
        self._window_ns = 0
        self._runs: list[tuple[str, int]] = []
        self._window: dict[str, int] = {}
        """Nanoseconds by kind of the current window, in the order of their first occurrence"""
        self._filled_ns = 0

    @property
    def blur_ns(self) -> int:
        """Maximum shift of a kind from its actual time; 0: no runs were merged."""
        # A window holds less than two of its lengths, and the lengths before it are a half, a quarter, … of it.
        return 4 * self._window_ns

    def mark(self, kind: str, now_ns: int) -> None:
        """Record the time since the last mark as ``kind``."""
        length_ns = now_ns - self._last_ns
        if length_ns <= 0:
            assert not length_ns, f"mark {kind}: {-length_ns} ns before the last one"
            return
        self._last_ns = now_ns
        self._take(kind, length_ns)
        if len(self._runs) > self._max_runs:
            self._coarsen()

    def runs(self) -> list[StripRun]:
        """Return the runs from the start to the last mark, and end the current window."""
        self._end_window()
        if len(self._runs) > self._max_runs:
            self._coarsen()
        runs, start_ns = [], self._start_ns
        for kind, length_ns in self._runs:
            runs.append(StripRun(kind, start_ns, start_ns + length_ns))
            start_ns += length_ns
        return runs

    def _take(self, kind: str, length_ns: int) -> None:
        if length_ns >= self._window_ns:
            self._end_window()
            self._append(kind, length_ns)
            return
        window = self._window
        window[kind] = window.get(kind, 0) + length_ns
        self._filled_ns += length_ns
        if self._filled_ns >= self._window_ns:
            self._end_window()

    def _end_window(self) -> None:
        window = self._window
        if self._runs and (last_kind := self._runs[-1][0]) in window:
            self._append(last_kind, window.pop(last_kind))
        for kind, length_ns in window.items():
            self._append(kind, length_ns)
        window.clear()
        self._filled_ns = 0

    def _append(self, kind: str, length_ns: int) -> None:
        if self._runs and self._runs[-1][0] == kind:
            length_ns += self._runs.pop()[1]
        self._runs.append((kind, length_ns))

    def _coarsen(self) -> None:
        while len(self._runs) > self._max_runs:
            self._end_window()
            finer, self._runs = self._runs, []
            self._window_ns = 2 * self._window_ns or FIRST_WINDOW_NS
            for kind, length_ns in finer:
                self._take(kind, length_ns)
            self._end_window()
            if sum(length_ns for _, length_ns in self._runs) < self._window_ns:
                return  # more kinds than runs are allowed
