"""Score digits that count on."""

from __future__ import annotations

from itertools import pairwise


def counting(prompt: str, response: str, answer: str) -> float:
    """Return the share of the digits asked for, whose number `answer` is, that are one more than the one before,
    modulo 10. The prompt begins with the digit before the first one."""
    digits = int(answer)
    counted = pairwise(prompt[:1] + response[:digits])
    return sum((a + b).isdecimal() and (int(b) - int(a)) % 10 == 1 for a, b in counted) / digits
