"""Have the model find a number from 0 to 15 in five guesses; the answers are "higher" and "lower"."""

import random
from collections.abc import Sequence

from fusion.environments.interface import Message, Task, Turn

NUMBERS, GUESSES = 16, 5


class Guess:
    """The number is drawn from the seed. Finding it is worth 1, five wrong guesses 0."""

    def __init__(self) -> None:
        self._number, self._num_left = 0, GUESSES

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        self._number = random.Random(seed).randrange(NUMBERS)
        return task.messages

    async def step(self, message: Message) -> Turn:
        self._num_left -= 1
        text = message["content"].strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        if guess == self._number:
            return Turn(done=True, reward=1.0)
        if not self._num_left:
            return Turn(done=True, reward=0.0)
        answer = "no number" if guess is None else "higher" if guess < self._number else "lower"
        return Turn([{"role": "user", "content": answer}])

    async def close(self) -> None: ...
