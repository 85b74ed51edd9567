"""Record the result of every stage, and format them as one JSON object and as lines of text. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stalesync.smoke.prerequisites import Missing

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
TAIL_LINES = 40
"""Last lines of a failed process's output that a report keeps"""


@dataclass(frozen=True)
class StageResult:
    """Report one stage. ``status``: `ok`, `failed`, or `skipped` (which `error` explains); ``seconds``: of wall time,
    with the start of its processes; ``figures``: measured values by name; sizes in bytes, times in seconds; ``error``:
    the last line of the error, with the rank of the process it came from; ``output``: the end of what the failed
    process wrote."""

    name: str
    status: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    output: str = ""


@dataclass(frozen=True)
class SmokeReport:
    """``machine``: versions, driver and cards (`prerequisites.describe_machine`); ``missing``: what it lacks."""

    device: str
    machine: Mapping[str, Any]
    missing: Sequence[Missing]
    stages: Sequence[StageResult]

    @property
    def ok(self) -> bool:
        return all(stage.status == OK for stage in self.stages)

    def as_json(self) -> str:
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2, ensure_ascii=False) + "\n"


def lines_of(stage: StageResult, width: int) -> list[str]:
    """Format a stage: its status and figures in a line, and its error below."""
    figures = ", ".join(
        f"{name} {_short(value)}" for name, value in stage.figures.items() if isinstance(value, (int, float, str))
    )
    lines = [f"{stage.status:<8} {stage.name:<{width}} {stage.seconds:7.1f} s  {figures}".rstrip()]
    return lines + ([f"{'':<8} {'':<{width}} → {stage.error}"] if stage.error else [])


def _short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def tail(text: str) -> str:
    """Return the last lines of an output."""
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])


def check(holds: bool, claim: str, *values: Any) -> None:
    """Raise RuntimeError with the claim and the values unless it holds."""
    if not holds:
        raise RuntimeError(f"{claim}: {', '.join(map(str, values))}")
