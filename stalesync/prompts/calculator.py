"""Generate sums for the environment `calculator`, and the chats that teach a small model to call its tool.

12+34=  ─► call of the calculator with 12+34 ─► 46 ─► 46           of `CalculatorRows`, in its `solution`
123     ─► 123         123+45:  ─► :123+45                         of `RepeatRows`: what is read can be repeated
"""

import random
from typing import Any

from stalesync.prompts.config import DataConfig
from stalesync.prompts.rows import DrawnRows, Row
from stalesync.prompts.tokenizer import CALL, CALL_END


class CalculatorRows(DrawnRows):
    """An endless source of sums of 2 to `max_terms` numbers, each with `min_digits` to `max_digits` digits."""

    source = stream = "calculator"

    def __init__(self, config: DataConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._digits, self._terms = (config.min_digits, config.max_digits), config.max_terms

    def longest(self) -> list[tuple[str, Row]]:
        number = 10 ** self._digits[1] - 1
        return [("the longest problem of data.source='calculator'", _sum_of([number] * self._terms))]

    def problem(self, rng: random.Random) -> Row:
        return _sum_of([number_of(rng, *self._digits) for _ in range(rng.randint(2, self._terms))])


class RepeatRows:
    """An endless source of numbers, and pairs of them, of at most five digits, to be repeated; and what a tool says."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def row(self, index: int) -> Row:
        rng = random.Random(f"{self._seed}-repeat-{index}")
        pair = f"{number_of(rng, 1, 5)}+{number_of(rng, 1, 5)}"
        text, result = str(number_of(rng, 1, 5)) if rng.random() < 0.3 else pair, str(number_of(rng, 1, 5))
        marked = rng.random() < 0.6  # a response that begins with a mark repeats from one token further away
        turns = [_says("assistant", answer := f":{text}" if marked else text)]
        if rng.random() < 0.5:
            turns += [_says("tool", result), _says("assistant", result)]
        return Row(f"{text}:" if marked else text, answer, {"solution": turns})


def number_of(rng: random.Random, min_digits: int, max_digits: int) -> int:
    """Draw a number, its number of digits first."""
    digits = rng.randint(min_digits, max_digits)
    return rng.randrange(10 ** (digits - 1), 10**digits)


def _sum_of(numbers: list[int]) -> Row:
    text, result = "+".join(map(str, numbers)), str(sum(numbers))
    call = _says("assistant", f"{CALL}{text}{CALL_END}")
    return Row(f"{text}=", result, {"solution": [call, _says("tool", result), _says("assistant", result)]})


def _says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
