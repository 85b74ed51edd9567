"""Ask for a sum, and offer a calculator. Expressions are never executed as code."""

import ast
import operator
import re
from collections.abc import Callable, Sequence

from fusion.environments.interface import Message, Task, Turn
from fusion.environments.tools import Tools
from fusion.rewards.arithmetic import arithmetic

OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip
EXPRESSION = re.compile(r"[-+*() 0-9]{1,200}")
"""What an expression contains; its length bounds depth and size of the result"""


def calculator(expression: str) -> str:
    """Compute an expression of whole numbers, +, -, * and parentheses."""
    if not EXPRESSION.fullmatch(expression):
        raise ValueError("expected numbers, +, -, * and parentheses, at most 200 characters")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, MemoryError, RecursionError):  # the last two are those of a parser's stack
        raise ValueError(f"{expression!r} is no expression") from None


def _value(node: ast.expr) -> int:
    """Return the value of a tree of operations; it is walked, not executed."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError("expected only +, - and *")


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
