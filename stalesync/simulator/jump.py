"""Sum the seconds of consecutive steps of an engine in closed form.

In step k a rank takes the maximum of some lines a + g x k (`EngineCost.decode_lines`), and the engine, whose ranks step
together, the maximum over all ranks: a convex, piecewise linear function of k. Where one line is the maximum at both
ends of an interval it is so inside of it, and the sum is that of an arithmetic series; elsewhere the interval is
halved.

    seconds of a step │      ╱      `JumpPiece`s: first step, number of steps, seconds of the first, growth
                      │ ___╱
                      └────────► k

Invariant (property-tested): the sum equals that of a loop over the steps, up to rounding; a piece's times increase.

Cost, for n steps, r ranks and p changes of the maximum: O(r p log n), most often O(r)."""

from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import numpy as np

from fusion.costmodel.pace import EngineCost

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class JumpPiece:
    """``count`` steps, of which the first takes ``first_s`` and each further one ``growth_s`` more; they begin after
    ``before`` steps and ``begins_s`` seconds of the jump."""

    before: int
    begins_s: float
    count: int
    first_s: float
    growth_s: float

    def seconds(self, steps: int) -> float:
        """Return the seconds of its first steps."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)


class Jump:
    """Steps number ``first`` to ``first + count - 1``, which begin at ``begins_s``. ``fixed``, ``growth``: [lines and
    ranks] of every line the seconds at step 0 and their growth with the step's number."""

    __slots__ = ("begins_s", "count", "pieces", "seconds")

    def __init__(self, begins_s: float, first: int, count: int, fixed: Array, growth: Array) -> None:
        self.begins_s, self.count = begins_s, count
        self.pieces: list[JumpPiece] = []
        self.seconds = 0.0
        self._add(first, count, fixed, growth)

    def boundary(self, time: float) -> int:
        """Return the number of steps after which ``time`` is reached, at least 0 and at most ``count``."""
        after_s = time - self.begins_s
        if after_s <= 0:
            return 0
        for piece in self.pieces:
            if piece.begins_s + piece.seconds(piece.count) >= after_s:
                return piece.before + _steps_until(piece, after_s - piece.begins_s)
        return self.count

    def time_of(self, steps: int) -> float:
        """Return the time at which this many steps are done."""
        for piece in self.pieces:
            if steps <= piece.before + piece.count:
                return self.begins_s + piece.begins_s + piece.seconds(steps - piece.before)
        raise AssertionError(f"{steps} of {self.count} steps")

    def _add(self, first: int, count: int, fixed: Array, growth: Array) -> None:
        low = fixed + growth * first
        at_low = int(low.argmax())
        first_s = float(low[at_low])
        if count == 1:
            self._append(1, first_s, 0.0)
            return
        high = fixed + growth * (first + count - 1)
        at_high = int(high.argmax())
        last_s = float(high[at_high])
        if at_low == at_high or float(high[at_low]) == last_s or float(low[at_high]) == first_s:
            self._append(count, first_s, (last_s - first_s) / (count - 1))
            return
        half = count // 2
        self._add(first, half, fixed, growth)
        self._add(first + half, count - half, fixed, growth)

    def _append(self, count: int, first_s: float, growth_s: float) -> None:
        before = self.pieces[-1].before + self.pieces[-1].count if self.pieces else 0
        piece = JumpPiece(before, self.seconds, count, first_s, growth_s)
        self.pieces.append(piece)
        self.seconds += piece.seconds(count)


def _steps_until(piece: JumpPiece, seconds: float) -> int:
    """Return the least number of steps of a piece that take at least ``seconds``."""
    slope, start = piece.growth_s / 2, piece.first_s - piece.growth_s / 2
    if slope > 0:
        estimate = (-start + sqrt(max(0.0, start * start + 4 * slope * seconds))) / (2 * slope)
    else:
        estimate = seconds / piece.first_s if piece.first_s else 0.0
    steps = min(piece.count, max(0, ceil(estimate) - 1))
    while steps < piece.count and piece.seconds(steps) < seconds:
        steps += 1
    while steps and piece.seconds(steps - 1) >= seconds:
        steps -= 1
    return steps


class RankLines:
    """Keep the lines of all ranks of an engine: a column for each rank, which changes when its sequences do."""

    def __init__(self, cost: EngineCost, num_ranks: int) -> None:
        self._cost, self._num_ranks = cost, num_ranks
        self._by_decoding: dict[tuple[int, int], list[tuple[float, float]]] = {}
        width = len(self._lines(1)) * num_ranks
        self._fixed, self._growth = np.zeros(width), np.zeros(width)

    def clear(self) -> None:
        """Empty all ranks: they decode nothing."""
        self._fixed[:] = 0.0
        self._growth[:] = 0.0

    def set(self, rank: int, *, decoding: int, offset: float, growth: float, drafted: int = 0) -> None:
        """Set what a rank decodes: ``decoding`` sequences, the sum of whose contexts in step k is ``offset`` + k x
        ``growth``, and ``drafted`` tokens behind each."""
        for row, (fixed, slope) in enumerate(self._lines(decoding, drafted)):
            self._fixed[row * self._num_ranks + rank] = fixed + slope * offset
            self._growth[row * self._num_ranks + rank] = slope * growth

    def seconds(self, step: int) -> float:
        """Return the seconds of a step in which all ranks decode."""
        return float((self._fixed + self._growth * step).max())

    def jump(self, begins_s: float, first: int, count: int) -> Jump:
        """Return ``count`` such steps from number ``first`` on."""
        return Jump(begins_s, first, count, self._fixed, self._growth)

    def _lines(self, decoding: int, drafted: int = 0) -> list[tuple[float, float]]:
        lines = self._by_decoding.get((decoding, drafted))
        if lines is None:
            lines = self._cost.decode_lines(max(1, decoding), drafted)
            lines = self._by_decoding[decoding, drafted] = lines if decoding else [(0.0, 0.0)] * len(lines)
        return lines
