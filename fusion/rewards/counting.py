"""Score digits that count on."""

from itertools import pairwise

NEXT = {(digit, str((int(digit) + 1) % 10)) for digit in "0123456789"}
"""Pairs of successive digits"""


def counting(prompt: str, response: str, answer: str) -> float:
    """Return the share of the digits asked for, whose number `answer` is, that are one more than the one before,
    modulo 10. The prompt begins with the digit before the first one.
    Raise ValueError: `answer` is not a number of at least 1."""
    if not answer.isascii() or not answer.isdecimal() or not int(answer):
        raise ValueError(f"the reference answer {answer!r}: expected a number of digits of at least 1")
    digits = int(answer)
    return sum(pair in NEXT for pair in pairwise(prompt[:1] + response[:digits])) / digits
