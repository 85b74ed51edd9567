"""Describe a reward that a guarded process has loaded. Plain data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OTHERS = "other_responses"
"""Parameter of a user's function that receives the other responses of the sample's group"""

PREFILL = "prefill"
"""Parameter of a user's function that receives the end of the prompt that belongs to the response, such as `<think>`"""

OF_RUN = (OTHERS, PREFILL)
"""Parameters that receive what a run knows, not a field of the row"""

BATCH = ("prompts", "responses")
"""Names of the first two parameters of a user's function that scores a batch of samples in one call"""


@dataclass(frozen=True)
class LoadedReward:
    """A reward function and what it asks for.
    ``score``: called as `score(prompt, response, answer, **fields)`, with fields of the data row; of a batch as
    `score(prompts, responses, answers, **fields)`, with lists of equal length.
    ``required_fields``: fields of the row without which it cannot be called.
    ``scores_batch``: it scores a batch of samples in one call, and returns as many numbers.
    ``asks``: which of `OF_RUN` it must get among the fields."""

    score: Callable[..., Any]
    required_fields: tuple[str, ...] = ()
    scores_batch: bool = False
    asks: tuple[str, ...] = ()
