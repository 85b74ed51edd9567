"""Ask for a sum, and offer a calculator. Expressions are parsed here, never evaluated as code."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fusion.environments.interface import Message, Task, Turn
from fusion.environments.tools import Tools
from fusion.rewards.arithmetic import arithmetic

TOKEN = re.compile(r"\s*([0-9]+|[-+*()])")
MAX_CHARS = 200
"""Maximum length of an expression: bounds depth and size of the result"""


def calculator(expression: str) -> str:
    """Compute an expression of whole numbers, +, -, * and parentheses."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"expected at most {MAX_CHARS} characters")
    return str(_Parser(expression).result())


class _Parser:
    """Recursive descent: sum = product {+- product}; product = factor {* factor}; factor = [-] (number | (sum))."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            match = TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"unexpected {text[at:].lstrip()[:1]!r}")
            self._tokens.append(match[1])
            at = match.end()

    def result(self) -> int:
        value = self._sum()
        if self._tokens:
            raise ValueError(f"unexpected {self._tokens[0]!r}")
        return value

    def _sum(self) -> int:
        value = self._product()
        while self._tokens and self._tokens[0] in "+-":
            sign = 1 if self._tokens.pop(0) == "+" else -1
            value += sign * self._product()
        return value

    def _product(self) -> int:
        value = self._factor()
        while self._tokens and self._tokens[0] == "*":
            self._tokens.pop(0)
            value *= self._factor()
        return value

    def _factor(self) -> int:
        token = self._tokens.pop(0) if self._tokens else ""
        if token == "-":
            return -self._factor()
        if token == "(":
            value = self._sum()
            if not self._tokens or self._tokens.pop(0) != ")":
                raise ValueError("expected ')'")
            return value
        if not token.isdigit():
            raise ValueError(f"unexpected {token!r}" if token else "unexpected end")
        return int(token)


class Calculator:
    """A turn with tool calls is answered by their results; one without is the answer, worth 1 if it is right."""

    def __init__(self) -> None:
        self._tools = Tools(calculator)
        self.tools = self._tools.schemas
        self._answer = ""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        self._answer = task.answer
        return task.messages

    async def step(self, message: Message) -> Turn:
        if message["tool_calls"]:
            return Turn([await self._tools.answer(call) for call in message["tool_calls"]])
        return Turn(done=True, reward=arithmetic("", message["content"], self._answer))

    async def close(self) -> None: ...
