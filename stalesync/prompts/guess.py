"""Generate games for the environment `guess`, and chats of guesses at random that never repeat, to teach a small model
the game."""

import random

from stalesync.prompts.rows import GeneratedRows, Row

NUMBERS, GUESSES = 16, 5
PROMPT = f"0-{NUMBERS - 1}?"
WORDS = tuple(map(str, range(10, NUMBERS)))
"""Numbers that are one token as those below 10: order and limits of numbers are then in their embeddings"""


class GuessRows(GeneratedRows):
    """An endless source of games: all have the same prompt, and the environment draws the number."""

    source = "guess"

    def row(self, index: int) -> Row:
        rng = random.Random(f"{self._seed}-guess-{index}")
        number, turns = rng.randrange(NUMBERS), []
        for guess in rng.sample(range(NUMBERS), GUESSES):
            turns.append({"role": "assistant", "content": str(guess)})
            if guess == number:
                return Row(PROMPT, str(number), {"solution": turns})
            turns.append({"role": "user", "content": "higher" if guess < number else "lower"})
        return Row(PROMPT, str(number), {"solution": turns[:-1]})

    def evaluation(self, count: int) -> list[Row]:
        return [self.row(-1 - index) for index in range(count)]
