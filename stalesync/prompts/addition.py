"""One-digit addition: `a+b=`, the answer is the sum (and then the end token). The task of the quickstart."""

from __future__ import annotations

import random

from stalesync.prompts.config import DataConfig
from stalesync.prompts.rows import Row, Rows


class AdditionRows(Rows):
    """All 100 problems. There are too few to hold some out: evaluation uses the same problems."""

    indices = range(100)
    fields = frozenset({"solution"})

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._seed = seed

    def row(self, index: int) -> Row:
        a, b = divmod(index, 10)
        return Row(f"{a}+{b}=", str(a + b), {"solution": str(a + b)})

    def name(self, index: int) -> str:
        return f"data.source='addition' problem {index}"

    def longest(self) -> list[tuple[str, Row]]:
        return [(self.name(index), self.row(index)) for index in self.indices]

    def evaluation(self, count: int) -> list[Row]:
        rng = random.Random(f"{self._seed}-addition-evaluation")
        order: list[int] = []
        while len(order) < count:
            order += rng.sample(self.indices, len(self.indices))
        return [self.row(index) for index in order[:count]]
