"""Generate games for the environment `guess`, and chats of legal guesses at random, to teach a small model the game."""

from __future__ import annotations

import random

from stalesync.prompts.config import DataConfig
from stalesync.prompts.rows import Row, Rows

NUMBERS, GUESSES = 16, 5
PROMPT = f"0-{NUMBERS - 1}?"


class GuessRows(Rows):
    """An endless source of games: all have the same prompt, and the environment draws the number."""

    fields = frozenset({"solution"})

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._seed = seed

    def row(self, index: int) -> Row:
        rng = random.Random(f"{self._seed}-guess-{index}")
        number, turns = rng.randrange(NUMBERS), []
        for left in reversed(range(GUESSES)):
            guess = rng.randrange(NUMBERS)
            turns.append({"role": "assistant", "content": str(guess)})
            if guess == number or not left:
                break
            turns.append({"role": "user", "content": "higher" if guess < number else "lower"})
        return Row(PROMPT, str(number), {"solution": turns})

    def name(self, index: int) -> str:
        return f"data.source='guess' game {index}"

    def evaluation(self, count: int) -> list[Row]:
        return [self.row(-1 - index) for index in range(count)]

    def longest(self) -> list[tuple[str, Row]]:
        return [("a game of data.source='guess'", self.row(0))]
