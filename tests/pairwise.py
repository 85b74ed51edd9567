"""Thin a grid of cases by pairwise choice: what goes wrong mostly takes two settings at once, seldom three.

A case is described by its factors, a tuple (layout sizes, device, kind of checkpoint, …). The chosen cases show every
pair of values of two factors that any case of the grid shows; the default run tests those, `-m slow` the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations_with_replacement
from typing import Any, TypeVar

import pytest

from fusion.model import Parallel

Case = TypeVar("Case")
Factors = tuple[Hashable, ...]


def pairs_of(factors: Factors) -> set[tuple[int, Hashable, int, Hashable]]:
    """Both places and values of every two factors of a case, and of each with itself: there may be only one."""
    places = combinations_with_replacement(range(len(factors)), 2)
    return {(i, factors[i], j, factors[j]) for i, j in places}


def choose(cases: Iterable[Case], factors: Callable[[Case], Factors]) -> list[Case]:
    """Few cases with every pair that occurs in ``cases``, in their order: always the one with the most pairs that are
    still missing, of equals the first, at last without those that the others made superfluous."""
    pairs = [(case, pairs_of(factors(case))) for case in cases]
    missing: set[tuple[int, Hashable, int, Hashable]] = set().union(*(found for _, found in pairs))
    chosen: list[int] = []
    while missing:
        best = max(range(len(pairs)), key=lambda index: len(pairs[index][1] & missing))
        chosen.append(best)
        missing -= pairs[best][1]
    for index in list(chosen):
        others = set().union(*(pairs[other][1] for other in chosen if other != index))
        if pairs[index][1] <= others:
            chosen.remove(index)
    return [pairs[index][0] for index in sorted(chosen)]


def thinned(
    cases: Sequence[Any],
    factors: Callable[[Any], Factors],
    extended: Callable[[Any], bool] = lambda case: False,
    rest: pytest.MarkDecorator = pytest.mark.slow,
) -> list[Any]:
    """All ``cases`` as parameters of a test, those that `choose` leaves out marked ``rest``, and of the others those of
    which ``extended`` is true marked so. A case that is a tuple is one argument each of its items."""
    kept = choose(cases, factors)
    marks = [rest if case not in kept else pytest.mark.extended if extended(case) else () for case in cases]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case, mark in zip(cases, marks, strict=True)
    ]


def is_wide(parallel: Parallel) -> bool:
    """Return whether a layout has four ranks or more in one stage of a pipeline."""
    return parallel.world // parallel.pp >= 4


def axes(parallel: Parallel) -> Factors:
    """The factors of a layout: its sizes."""
    return parallel.tp, parallel.ep, parallel.etp, parallel.pp, parallel.dp, parallel.cp
