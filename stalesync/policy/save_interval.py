"""Decide when a run saves a checkpoint (`run.save_every`). Pure: the caller has the clock.

Invariants: by steps, every multiple of the number is due; by time, a step is due if and only if at least that time has
passed since the previous cut and the previous checkpoint is written, so saving never makes the run wait for an
earlier save. What a crash costs is then at most the interval, one step, and the time that writing takes."""

import re
from dataclasses import dataclass

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
EXPECTED = "a number of steps (10), a time (90s, 30min, 2h), or 0: only after the last step"


@dataclass(frozen=True)
class SaveInterval:
    """``steps`` or ``seconds`` between two checkpoints; both None: only after the last step."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str) -> "SaveInterval":
        """Read `run.save_every`; raise ValueError, with what was expected, if it is no number of steps and no time."""
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|min|h)?", str(value).replace(" ", ""), re.ASCII)
        if match is None or isinstance(value, bool):
            raise ValueError(EXPECTED)
        number, unit = match.groups()
        if unit is not None and float(number) > 0:
            return cls(seconds=float(number) * UNITS[unit])
        if unit is None and number.isdigit():
            return cls(steps=int(number) or None)
        raise ValueError(EXPECTED)

    def due(self, step: int, elapsed_s: float, writing: bool) -> bool:
        """Return whether to save after ``step``. ``elapsed_s``: since the previous cut, or since the start of the run;
        ``writing``: whether the previous checkpoint is still being written."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and elapsed_s >= self.seconds and not writing
