"""Check the values of a config group, in the same way for all groups.

    check = Checks("rollout", self)
    check.integer("max_seqs", "max_batch_tokens", at_least=1)
    check.integer("max_length", at_least=1, null=True)
    check.number("top_p", above=0, at_most=1)
    check.one_of("suspended_kv", SUSPENDED_KV)
    check.that("block_size", self.block_size % 16 == 0, "a multiple of 16")

Every error is a `ValueError` that reads `group.key=value: expected …`. nan and inf are not numbers here, and neither is
a bool. Pure. It is in this package because every package may import it (`distqueue` imports none, and has checks of its
own).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Checks:
    """Check the attributes of ``values``, which are the keys of the config group ``group``.

    Args:
        group: prefix of the keys in an error message: a group (`rollout`), a node (`parallel.train`) or a request.
    """

    group: str
    values: Any

    def that(self, key: str, holds: bool, expected: str) -> None:
        """Check a condition on a key.

        Raises:
            ValueError: ``holds`` is false; says what is ``expected`` of the key.
        """
        if not holds:
            raise ValueError(f"{self.group}.{key}={_shown(getattr(self.values, key))}: expected {expected}")

    def integer(self, *keys: str, at_least: int | None = None, at_most: int | None = None, null: bool = False) -> None:
        """Expect whole numbers between ``at_least`` and ``at_most``, or None where ``null``.

        Raises:
            ValueError: names the first key that holds something else.
        """
        expected = _range("a whole number", at_least=at_least, at_most=at_most) + _or_null(null)
        for key in keys:
            value = getattr(self.values, key)
            whole = isinstance(value, int) and not isinstance(value, bool)
            holds = (value is None and null) or (whole and _within(value, at_least=at_least, at_most=at_most))
            self.that(key, holds, expected)

    def number(
        self,
        *keys: str,
        at_least: float | None = None,
        above: float | None = None,
        at_most: float | None = None,
        below: float | None = None,
        null: bool = False,
    ) -> None:
        """Expect finite numbers within the bounds, or None where ``null``.

        Raises:
            ValueError: names the first key that holds something else.
        """
        bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
        for key in keys:
            value = getattr(self.values, key)
            holds = (value is None and null) or (is_finite(value) and _within(value, **bounds))
            self.that(key, holds, _range("a number", **bounds) + _or_null(null))

    def boolean(self, *keys: str) -> None:
        """Expect true or false.

        Raises:
            ValueError: names the first key that holds something else.
        """
        for key in keys:
            self.that(key, isinstance(getattr(self.values, key), bool), "true or false")

    def one_of(self, key: str, choices: Collection[str], null: bool = False) -> None:
        """Expect one of ``choices``, or None where ``null``.

        Raises:
            ValueError: names the key and the choices.
        """
        value = getattr(self.values, key)
        holds = (value is None and null) or value in choices
        self.that(key, holds, f"one of {', '.join([*choices, *(['null'] if null else [])])}")


def is_finite(value: Any) -> bool:
    """Return whether ``value`` is an int or a float other than nan and inf."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of a float
        return False


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except ValueError:  # a whole number of more digits than Python writes
        return "a whole number of thousands of digits"


def _within(
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> bool:
    return (
        (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
    )


def _range(
    kind: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> str:
    low, high = (above if at_least is None else at_least), (below if at_most is None else at_most)
    if low is None and high is None:
        return kind
    if low is not None and high is not None:
        opening, closing = "[" if above is None else "(", "]" if below is None else ")"
        return f"{kind} in {opening}{low:g}, {high:g}{closing}"
    if low is not None:
        return f"{kind} above {low:g}" if at_least is None else f"{kind} of at least {low:g}"
    return f"{kind} below {high:g}" if at_most is None else f"{kind} of at most {high:g}"


def _or_null(null: bool) -> str:
    return ", or null" if null else ""
