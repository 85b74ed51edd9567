"""The config group `reward`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

BUILT_IN = ("arithmetic", "math")
NAMES = (*BUILT_IN, "custom")


@dataclass
class RewardConfig:
    """How a response is scored. `validate()` raises `ValueError` naming the key."""

    name: str = "arithmetic"
    """`arithmetic` (exact match of the answer), `math` (mathematical equality by math-verify) or `custom`
    (`reward.path`)."""

    path: str | None = None
    """`file.py:function` of your own reward, `fn(prompt, response, answer, **fields) -> float`; setting it implies
    `custom`."""

    model: str | None = None
    """Folder of a reward model (`Qwen3ForSequenceClassification` with one label, or its MoE sibling), whose score of
    prompt and response is the reward, in place of a rule; a role of the cards, see `fusion`."""

    time_limit_s: float = 5.0
    """Seconds of wall time one sample may take; past them its process is replaced and the sample counts as failed."""

    workers: int = 2
    """Processes that score samples side by side."""

    @property
    def kind(self) -> str:
        """The reward in force: `model` or `custom` where `reward.model` or `reward.path` is given, else `name`."""
        return "model" if self.model else "custom" if self.path else self.name

    def validate(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"reward.name={self.name!r}: expected one of {', '.join(NAMES)}")
        if self.model and self.path:
            raise ValueError(f"reward.model={self.model!r} and reward.path={self.path!r}: expected one of them")
        if self.kind == "custom":
            split_path(self.path)
        limit = self.time_limit_s
        if not (isinstance(limit, (int, float)) and math.isfinite(limit) and limit > 0):
            raise ValueError(f"reward.time_limit_s={limit!r}: expected a number of seconds above 0")
        if not (isinstance(self.workers, int) and self.workers >= 1):
            raise ValueError(f"reward.workers={self.workers!r}: expected a whole number of at least 1")


def split_path(path: str | None) -> tuple[Path, str]:
    """The file and the function that `reward.path` names.

    Raises:
        ValueError: no path, not of the form `file.py:function`, or no such file.
    """
    if not path:
        raise ValueError("reward.name='custom' needs reward.path=file.py:function")
    file, colon, function = path.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        raise ValueError(f"reward.path={path!r}: expected file.py:function")
    if not Path(file).is_file():
        raise ValueError(f"reward.path={path!r}: there is no file {Path(file).absolute()}")
    return Path(file), function
