"""Order the sides of a benchmark within its rounds, so that none always runs first or after the same other."""

from __future__ import annotations

from collections.abc import Sequence


def in_rotation(names: Sequence[str], round: int) -> list[str]:
    """Return all ``names``, beginning one further in every round; ``round`` may be negative (a warm-up)."""
    first = round % len(names)
    return [*names[first:], *names[:first]]
