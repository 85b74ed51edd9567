"""Count on from a digit: answers of any length that a very small model can learn.

    prompt    7=
    response  8901234…     each digit is one more than the one before it, modulo 10

The solutions that teach a base model have random lengths: it learns how to count on, and to end too early.

Invariant: `row` and `evaluation` have no problem in common."""

import random

from stalesync.prompts.config import DataConfig
from stalesync.prompts.rows import GeneratedRows, Row

HELD_OUT = (3, 8)


class CountingRows(GeneratedRows):
    """Draw prompts from eight digits, without end; two other digits are held out. Every prompt asks for
    ``data.max_digits`` digits."""

    source = "counting"

    def __init__(self, config: DataConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._digits = config.max_digits
        self._trained = [digit for digit in range(10) if digit not in HELD_OUT]

    def row(self, index: int) -> Row:
        rng = random.Random(f"{self._seed}-counting-{index}")
        return self._row(rng.choice(self._trained), rng)

    def evaluation(self, count: int) -> list[Row]:
        rng = random.Random(f"{self._seed}-counting-evaluation")
        return [self._row(HELD_OUT[index % len(HELD_OUT)], rng) for index in range(count)]

    def _row(self, start: int, rng: random.Random) -> Row:
        digits = range(start + 1, start + 1 + rng.randint(1, self._digits))
        return Row(f"{start}=", str(self._digits), {"solution": "".join(str(digit % 10) for digit in digits)})
