"""Exact match of the answer of a generated arithmetic problem."""

from __future__ import annotations

MARKER = "#"


def arithmetic(prompt: str, response: str, answer: str, **fields: object) -> float:
    """1.0 where `response` (special tokens left out) ends in the right answer, else 0.0.

    An answer without the marker `#` must be the whole response. An answer that starts with it (`#0b4a6`, what stands
    after the working) must end the response, and the response may hold only that one marker: guessing several times
    does not pay.
    """
    response, answer = response.strip(), answer.strip()
    if not answer.startswith(MARKER):
        return float(response == answer)
    return float(response.endswith(answer) and response.count(MARKER) == 1)
