"""One-digit addition: `a+b=`, the answer is the sum (and then the end token). The task of the quickstart."""

import random

from stalesync.prompts.rows import GeneratedRows, Row


class AdditionRows(GeneratedRows):
    """All 100 problems. There are too few to hold some out: evaluation uses the same problems."""

    source = "addition"
    indices = range(100)

    def row(self, index: int) -> Row:
        a, b = divmod(index, 10)
        return Row(f"{a}+{b}=", str(a + b), {"solution": str(a + b)})

    def longest(self) -> list[tuple[str, Row]]:
        return [(self.name(index), self.row(index)) for index in self.indices]

    def evaluation(self, count: int) -> list[Row]:
        rng = random.Random(f"{self._seed}-addition-evaluation")
        order: list[int] = []
        while len(order) < count:
            order += rng.sample(self.indices, len(self.indices))
        return [self.row(index) for index in order[:count]]
