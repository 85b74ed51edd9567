"""Keep the rewards of each data row's last responses, by which engines weigh drafts from them. Pure.

    scored groups ─ observe ─► rewards by row ─ of ─► requests of the row's next group (`Request.last_rewards`)

Invariants (property-tested): a row has the rewards of its group that was scored last, in the order of its responses'
numbers; a group has none of its own; of more than ``max_rows`` rows those scored longest ago are dropped; a restored
history is the same. Cost: O(1) a group; about 150 bytes and 32 per response for each row."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fusion.inference.request import NO_REWARDS, LastRewards
from fusion.rollout.length_history import MAX_ROWS, row_of


class RewardHistory:
    """Hold rewards by row, the newest rows last."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._rewards: dict[str, LastRewards] = {}

    def observe(self, rewards: Mapping[str, float | None]) -> None:
        """Record the rewards of a group's responses, by their ids; they replace those of the row's earlier group.
        None, or not finite: the response has none."""
        group = next(iter(rewards)).rsplit("/", 1)[0]
        numbers = {int(id.rsplit("/", 1)[1]): reward for id, reward in rewards.items()}
        in_order = [numbers.get(number) for number in range(max(numbers) + 1)]
        self._rewards.pop(row_of(group), None)
        finite = tuple(reward if reward is not None and math.isfinite(reward) else None for reward in in_order)
        self._rewards[row_of(group)] = group, finite
        if len(self._rewards) > self._max_rows:
            del self._rewards[next(iter(self._rewards))]

    def of(self, group: str) -> LastRewards:
        """Return what is known of the last group of this group's row."""
        last = self._rewards.get(row_of(group), NO_REWARDS)
        return NO_REWARDS if last[0] == group else last

    def state_dict(self) -> dict[str, list[float | None]]:
        """Return plain JSON: the rewards by group."""
        return {group: list(rewards) for group, rewards in self._rewards.values()}

    def load_state_dict(self, state: Mapping[str, Sequence[Any]]) -> None:
        self._rewards = {row_of(group): (group, tuple(rewards)) for group, rewards in state.items()}
