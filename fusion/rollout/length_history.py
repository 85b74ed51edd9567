"""Keep the lengths of each data row's last responses, and how many of all responses ran away. Pure.

Adjacent epochs rhyme (RhymeRL, arXiv 2508.18588): the ranks of the lengths of the same prompts move by 2 to 4 %, so an
order of requests knows from the last epoch which will be long. A response runs away if it is more than `RUNAWAY` times
as long as the median of its group: nothing foretells it. Whether lengths rhyme at all is measured: by how far
the mean of a group is from that of the row's last group, against how far it is from the mean of its step.

Groups that have ended are known from the next step on, in the order in which they were admitted: so at staleness 0 it
does not matter which of them ended first, and a run is repeatable.

Invariants (property-tested in tests/rollout/test_length_history.py): a row has the lengths of its last group of the
last step that had one; of more than ``max_rows`` rows those whose group is oldest are dropped; the share of runaways is
that of all groups, of which one counts half as much after `HALF_LIFE` further ones, and so are both distances of rows
that had a group before; none of this depends on the order in which the groups of a step end; a restored history is the
same. Cost, for a group of G: O(G log G); about 150 bytes and 4 per response for each row."""

from array import array
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

MAX_ROWS = 1_000_000
RUNAWAY = 4
"""Rarer than one in a thousand in a group of lognormal lengths whose logarithms deviate by 0.43"""
MIN_GROUP = 4
"""Minimum responses of a group for its median to be its usual length"""
HALF_LIFE = 256
KEPT = 0.5 ** (1 / HALF_LIFE)
MIN_RESPONSES = 500
"""Minimum number of counted responses, so that a few of the first do not decide"""


def row_of(group: str) -> str:
    """Return the data row of a group: its id, `e{epoch}-{row}`, without the epoch."""
    return group.split("-", 1)[-1]


def _mean(lengths: Sequence[int]) -> float:
    return sum(lengths) / len(lengths)


class LengthHistory:
    """Hold response lengths in tokens by row, the newest rows last."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._lengths: dict[str, array[int]] = {}
        self._num_runaways = self._num_responses = 0.0
        """Sums over all groups, by weight"""
        self._error = self._spread = 0.0
        """Distances of groups' means from that of the row's last group, and from that of their step; sums by weight"""
        self._ended: list[tuple[int, str, Sequence[int]]] = []
        """Position, row and lengths of each group that has ended since the last `end_step`"""

    @property
    def runaway_share(self) -> float:
        return self._num_runaways / max(self._num_responses, MIN_RESPONSES)

    @property
    def foretells(self) -> bool:
        """Whether a row's last group says more about its next one than the other groups of the step."""
        return self._error <= self._spread

    def observe(self, position: int, row: str, lengths: Sequence[int]) -> None:
        """Record the lengths of a group's responses. ``position``: in the order in which groups were admitted."""
        self._ended.append((position, row, lengths))

    def end_step(self) -> None:
        """Make what was recorded known: the lengths of a row's group replace those of its earlier one."""
        ended, self._ended = sorted(self._ended), []
        usual_mean = fmean(map(_mean, (lengths for _, _, lengths in ended))) if ended else 0.0
        for _, row, lengths in ended:
            if earlier := self._lengths.get(row):
                self._error = self._error * KEPT + abs(_mean(lengths) - _mean(earlier))
                self._spread = self._spread * KEPT + abs(_mean(lengths) - usual_mean)
            if self._max_rows:
                self._lengths.pop(row, None)
                self._lengths[row] = array("I", lengths)
                if len(self._lengths) > self._max_rows:
                    del self._lengths[next(iter(self._lengths))]
            usual = sorted(lengths)[len(lengths) // 2] if len(lengths) >= MIN_GROUP else max(lengths)
            self._num_runaways = self._num_runaways * KEPT + sum([tokens > RUNAWAY * usual for tokens in lengths])
            self._num_responses = self._num_responses * KEPT + len(lengths)

    def of(self, row: str) -> Sequence[int]:
        """Return the lengths of the row's last group; empty if it has had none."""
        return self._lengths.get(row, ())

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": {row: list(lengths) for row, lengths in self._lengths.items()},
            "num_runaways": self._num_runaways,
            "num_responses": self._num_responses,
            "error": self._error,
            "spread": self._spread,
            "ended": [[row, list(lengths)] for _, row, lengths in sorted(self._ended)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history into this empty one. An earlier format has the rows only."""
        self._lengths = {row: array("I", lengths) for row, lengths in state.get("rows", state).items()}
        self._num_runaways = state.get("num_runaways", 0.0)
        self._num_responses = state.get("num_responses", 0.0)
        self._error, self._spread = state.get("error", 0.0), state.get("spread", 0.0)
        ended = state.get("ended", [])  # before all groups that are admitted from now on
        self._ended = [(number - len(ended), row, lengths) for number, (row, lengths) in enumerate(ended)]
