"""Generate addition problems whose answers write out every step: long answers that a very small model can learn.

Every digit is preceded by the letter of its place (`a` ones, `b` tens, …), in the problem and in the answer:

    prompt    b4a7+b8a6=
    response  a:0+7=07+6=13,a3;b:1+4=05+8=13,b3;#1b3a3
              │ │ └ each number's digit, and the running sum after it
              │ └ the carry: tens of the last running sum
              └ the place; at its end `,a3` states the digit of the result

After `#` follows the result, most significant digit first, beginning with the last carry (also if it is 0). Each token
depends only on a letter look-up and a few tokens nearby, which makes the task learnable. A response to m numbers of n
digits has n (5m + 7) + 2n + 3 tokens including the end token: 41 for 2 numbers of 2 digits, 293 for 4 of 10. The
letters are the index hints of Zhou et al. 2023, "What algorithms can transformers learn?"; the written steps are a
scratchpad (Nye et al. 2021), beginning with the ones.

Invariant, besides those of `DrawnRows`: `answer` is the end of `solution`, from its only `#` on."""

import random
from collections.abc import Sequence

from fusion.rewards.arithmetic import MARKER
from stalesync.prompts.config import DataConfig
from stalesync.prompts.rows import DrawnRows, Row
from stalesync.prompts.tokenizer import PLACES


def worked_problem(numbers: Sequence[int]) -> Row:
    """Return the sum of `numbers` (all with the same number of digits, at most 10) as prompt, answer and solution."""
    places = len(str(numbers[0]))
    assert all(len(str(number)) == places for number in numbers) and places <= len(PLACES)
    columns = [[number // 10**place % 10 for number in numbers] for place in range(places)]
    carry, result, working = 0, [], []
    for letter, digits in zip(PLACES, columns, strict=False):
        step, total = f"{letter}:{carry}", carry
        for digit in digits:
            total += digit
            step += f"+{digit}={total:02d}"
        carry = total // 10
        result.append(total % 10)
        working.append(f"{step},{letter}{total % 10};")
    prompt = "+".join(_with_places([column[i] for column in columns]) for i in range(len(numbers))) + "="
    answer = f"{MARKER}{carry}{_with_places(result)}"
    return Row(prompt, answer, {"solution": "".join(working) + answer, "digits": places, "terms": len(numbers)})


def _with_places(digits: Sequence[int]) -> str:
    return "".join(f"{PLACES[i]}{digits[i]}" for i in reversed(range(len(digits))))


class WorkedRows(DrawnRows):
    """An endless source of problems of `min_digits` to `max_digits` digits and 2 to `max_terms` numbers, both drawn
    uniformly."""

    source, stream = "worked_arithmetic", "worked"
    fields = frozenset({"solution", "digits", "terms"})

    def __init__(self, config: DataConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._digits = (config.min_digits, config.max_digits)
        self._terms = (2, config.max_terms)

    def longest(self) -> list[tuple[str, Row]]:
        problem = worked_problem([10 ** self._digits[1] - 1] * self._terms[1])
        return [("the longest problem of data.source='worked_arithmetic'", problem)]

    def problem(self, rng: random.Random) -> Row:
        digits, terms = rng.randint(*self._digits), rng.randint(*self._terms)
        return worked_problem([rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(terms)])
