"""Describe a reward that a guarded process has loaded. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OTHERS = "other_responses"
"""Parameter of a user's function that receives the other responses of the sample's group"""

BATCH = ("prompts", "responses")
"""Names of the first two parameters of a user's function that scores a batch of samples in one call"""


@dataclass(frozen=True)
class LoadedReward:
    """A reward function and what it asks for.

    Attributes:
        score: called as `score(prompt, response, answer, **fields)`, with fields of the data row; of a batch as
            `score(prompts, responses, answers, **fields)`, with lists of equal length.
        required_fields: fields of the row without which it cannot be called.
        scores_batch: it scores a batch of samples in one call, and returns as many numbers.
        needs_group: among the fields it must get `OTHERS`.
    """

    score: Callable[..., Any]
    required_fields: tuple[str, ...] = ()
    scores_batch: bool = False
    needs_group: bool = False
