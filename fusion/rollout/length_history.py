"""Keep the lengths of each data row's last responses. Pure.

Adjacent epochs rhyme (RhymeRL, arXiv 2508.18588): the ranks of the lengths of the same prompts move by 2 to 4 %, so an
order of requests knows from the last epoch which will be long.

Invariants (property-tested in tests/rollout/test_length_history.py): a row has the lengths of its group that ended
last; of more than ``max_rows`` rows those whose group ended longest ago are dropped; a restored history is the same.
Cost: O(1) a group; about 150 bytes and 4 per response for each row.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

MAX_ROWS = 1_000_000


def row_of(group: str) -> str:
    """Returns the data row of a group: its id, `e{epoch}-{row}`, without the epoch."""
    return group.split("-", 1)[-1]


class LengthHistory:
    """Holds response lengths in tokens by row, the newest rows last."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._lengths: dict[str, array[int]] = {}

    def observe(self, row: str, lengths: Sequence[int]) -> None:
        """Records the lengths of a group's responses; they replace those of the row's earlier group."""
        self._lengths.pop(row, None)
        self._lengths[row] = array("I", lengths)
        if len(self._lengths) > self._max_rows:
            del self._lengths[next(iter(self._lengths))]

    def of(self, row: str) -> Sequence[int]:
        """Returns the lengths of the row's last group; empty if it has had none."""
        return self._lengths.get(row, ())

    def state_dict(self) -> dict[str, list[int]]:
        """Returns plain JSON."""
        return {row: list(lengths) for row, lengths in self._lengths.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a history into this empty one."""
        self._lengths = {row: array("I", lengths) for row, lengths in state.items()}
