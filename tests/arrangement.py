"""Order the tests so that the processes of a parallel run share little twice, and none waits for another at the end.

pytest-xdist gives the n-th process the n-th part of the list, and who has finished takes what another would do last.
Each part begins with the tests that start processes, which take longest:

    process 0   tests that use Ray: first the Ray that tests share, then those of runs (`warm.py`)
    others      tests that run ranks (`helpers.run_ranks`)

and ends with tests that need neither. Tests of a module stay together, in their order, for the sake of its fixtures.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import pytest

LEAVES = ("tests.warm", "tests.helpers")
"""Modules whose functions are looked for, not what they use themselves"""
KINDS = ("ray", "runs", "ranks", "")
"""The Ray of the process that runs tests; others, and runs; ranks; neither"""


def arranged(items: Sequence[Any], kinds: Sequence[str], processes: int) -> list[Any]:
    """Return ``items`` as ``processes``, two or more, take parts of them. ``kinds``: of each item, of KINDS."""
    shared, runs, ranks, others = (
        [item for item, kind in zip(items, kinds, strict=True) if kind == wanted] for wanted in KINDS
    )
    ends = [len(ranks) * number // (processes - 1) for number in range(processes)]
    found: list[Any] = []
    for number in range(processes):
        found += ranks[ends[number - 1] : ends[number]] if number else [*shared, *runs]
        room = max(0, len(items) * (number + 1) // processes - len(found))
        found += others[:room]
        others = others[room:]
    return found + others


def kind_of(item: pytest.Item) -> str:
    """Return what the tests of an item's module start, of KINDS."""
    names = _started_by(getattr(item, "module", sys))
    if "use_ray" in names:
        return "ray"
    if "launcher" in names or "start" in getattr(item, "fixturenames", ()):
        return "runs"
    return "ranks" if "run_ranks" in names else ""


@cache
def _started_by(module: ModuleType, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return which functions of LEAVES a module uses, or modules of tests from which it imports."""
    names: set[str] = set()
    for name, value in vars(module).items():
        origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if origin in LEAVES:
            names.add(getattr(value, "__name__", name))
        elif isinstance(origin, str) and origin.startswith("tests.") and origin not in seen | {module.__name__}:
            names |= _started_by(sys.modules[origin], seen | {module.__name__})
    return frozenset(names)
