"""Show the progress of a run or of other long work.

with LiveView(total_steps=100) as view:            a table of the last steps and a bar with ETA and tokens/s;
    view.phase("generate", done=120, total=256)    where stdout is not a terminal, one aligned line per step
    view.update(step, metrics)

with progress("warm-up", total=50) as bar:         any other long work
    bar.advance(loss=0.31)

On a terminal the view is redrawn several times per second. Elsewhere lines are printed only by these calls: `phase` and
`advance` print one if nothing was printed for some seconds."""

import time
from collections import deque
from collections.abc import Mapping

from rich import box, get_console
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fusion.telemetry.columns import COLUMNS, align, columns_for, duration, header_lines

HEADER_EVERY = 20
"""Plain view: number of steps after which the header is repeated."""
QUIET_S = 10.0
"""Plain view: seconds without output after which `LiveView.phase` prints the phase within the step."""


class LiveView:
    """Show the progress of a run of `total_steps` steps, of which `steps_done` were completed before it was resumed.

    Use it as a context manager; the terminal is restored however the block ends. `console` defaults to rich's own."""

    def __init__(
        self,
        total_steps: int,
        title: str = "steps",
        steps_done: int = 0,
        keep: int = 10,
        console: Console | None = None,
    ) -> None:
        self.console = console or get_console()
        self.total_steps, self.done = total_steps, steps_done
        self._step = min(steps_done + 1, total_steps)
        """The step in progress; work after the last one (saving) counts as that one"""
        self._step_start = time.monotonic()
        self._stamps: deque[float] = deque([time.monotonic()], maxlen=keep + 1)
        self._rows: deque[dict[str, float]] = deque(maxlen=keep)
        self._phase = ""
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[speed]}"),
            expand=True,
            console=self.console,
        )
        self._task = self._bar.add_task(title, total=total_steps, completed=steps_done, speed="")
        self._live: Live | None = None
        self._printed = 0
        self._last_print = time.monotonic()

    def __enter__(self) -> "LiveView":
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._phase = ""
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None

    def begin(self) -> None:
        """Start the clock of the first step; earlier time is not counted in the duration of a step."""
        self._stamps = deque([time.monotonic()], maxlen=self._stamps.maxlen)
        self._step_start = time.monotonic()

    def begin_step(self, step: int) -> None:
        """Show the phases of `step` from now on, although the row of the step before may follow later."""
        self._step, self._phase, self._step_start = step, "", time.monotonic()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the row of a completed step; `step` counts from 1, also over the steps before a run was resumed."""
        row = {**metrics, "step": float(step)}
        self._rows.append(row)
        self._stamps.append(time.monotonic())
        self.done = step
        if step >= self._step:
            self.begin_step(min(step + 1, self.total_steps))
        speed = self.speed()
        self._bar.update(self._task, completed=self.done, speed=speed)
        if self._live is None:
            columns = columns_for(row)
            if self._printed % HEADER_EVERY == 0:
                self._print(*header_lines(columns))
            self._printed += 1
            self._print(f"{align([column.cell(row) for column in columns], columns)}   {self.eta()}")

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show the phase within the step and its progress if known. Cheap enough to call at every engine step."""
        self._phase = name if done is None else f"{name} {done}" if total is None else f"{name} {done}/{total}"
        now = time.monotonic()
        if self._live is None and now - self._last_print >= QUIET_S:
            self._print(f"  step {self._step}: {self._phase}, {duration(now - self._step_start)} into the step")

    def note(self, line: str) -> None:
        self._print(line)

    def eta(self) -> str:
        """Return the remaining time, estimated from the mean of the last steps."""
        if self.done >= self.total_steps:
            return "done"
        steps = len(self._stamps) - 1
        if steps == 0:
            return "ETA –"
        per_step = (self._stamps[-1] - self._stamps[0]) / steps
        return f"ETA {duration(per_step * (self.total_steps - self.done))}"

    def speed(self) -> str:
        """Return ETA and tokens per second, for the bar."""
        rate = self._rows[-1].get("perf/tokens_per_s") if self._rows else None
        return self.eta() if rate is None else f"{rate:,.0f} tokens/s  {self.eta()}"

    def _print(self, *lines: str) -> None:
        self._last_print = time.monotonic()
        for line in lines:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> Group:
        columns = columns_for(self._rows[-1]) if self._rows else COLUMNS
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
        for column in columns:
            table.add_column(column.title, justify="right", no_wrap=True, min_width=column.width)
        room = max(self.console.height - 6, 1)
        for row in list(self._rows)[-room:]:
            table.add_row(*(column.cell(row) for column in columns))
        since = duration(time.monotonic() - self._step_start)
        now = f"step {self._step}: {self._phase}, {since}" if self._phase else ""
        return Group(table, Text(now, style="dim", no_wrap=True), self._bar)


class Bar:
    """Show the progress of long work; created by `progress`."""

    def __init__(self, title: str, total: int | None, unit: str, console: Console, every_s: float) -> None:
        self.title, self.total, self.unit, self.done = title, total, unit, 0
        self._console, self._every_s = console, every_s
        self._start = self._last_print = time.monotonic()
        self._fields: dict[str, object] = {}
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("[bold]{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task(title, total=total, status=self.status())
            self._bar.start()
        else:
            self._print(self.status())

    def advance(self, count: int = 1, **fields: object) -> None:
        """Record `count` more completed units; `fields` (loss=0.31) are shown until the next call."""
        self.done += count
        self._fields.update(fields)
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, status=self.status())
        elif time.monotonic() - self._last_print >= self._every_s:
            self._print(self.status())

    def status(self) -> str:
        """Return progress, speed, remaining time, and the fields."""
        elapsed = time.monotonic() - self._start
        parts = [f"{self.done}{'' if self.total is None else f'/{self.total}'} {self.unit}".rstrip()]
        if self.done and elapsed > 0:
            parts.append(f"{self.done / elapsed:,.1f} {self.unit}/s" if self.unit else f"{self.done / elapsed:,.1f}/s")
            if self.total is not None:
                parts.append(f"ETA {duration(elapsed / self.done * max(self.total - self.done, 0))}")
        for name, value in self._fields.items():
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        return ", ".join(parts)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        elapsed = duration(time.monotonic() - self._start)
        ending = f"{self.done} {self.unit}".rstrip() + (f", stopped after {elapsed}" if kind else f" in {elapsed}")
        if self._bar is None:
            self._print(ending)
        else:
            self._bar.update(self._task, status=ending)
            self._bar.stop()

    def _print(self, text: str) -> None:
        self._last_print = time.monotonic()
        self._console.print(f"{self.title}: {text}", markup=False, highlight=False, soft_wrap=True)


def progress(
    title: str, total: int | None = None, unit: str = "", console: Console | None = None, every_s: float = 5.0
) -> Bar:
    """Show a bar for long work, in a `with` block; without a terminal, a line at the start and at the end, and one at a
    call of `Bar.advance` if the last is at least `every_s` seconds old."""
    return Bar(title, total, unit, console=console or get_console(), every_s=every_s)
