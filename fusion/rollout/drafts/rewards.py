"""Weigh the responses of a group by their rewards, for drafts from them. Pure.

As HistoSpec of RhymeRL (arXiv 2508.18588), which follows the better rewarded branch. Only the order of rewards within
a group matters, and how far they are apart, not their unit.

Invariants (property-tested): a weight is 1 to `MAX_WEIGHT`; of two responses the better rewarded has no smaller weight,
the best and the worst have different ones unless all rewards are equal; a response without a reward has `NEUTRAL`, and
so have all if their rewards are equal; weights do not change if all rewards are scaled alike."""

from collections.abc import Sequence

from fusion.inference.request import LastRewards

NEUTRAL, MAX_WEIGHT = 2, 4
"""Weight of a response without a reward, and of the best of its group; the worst has 1"""


def weights_of(rewards: Sequence[float | None]) -> list[int]:
    """Return the weights of the responses of a group; None: there is no reward."""
    known = [reward for reward in rewards if reward is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high / 2 - low / 2  # halves: the difference of finite floats may not be one
    if not span > 0:
        return [NEUTRAL] * len(rewards)
    return [
        NEUTRAL if reward is None else 1 + round((MAX_WEIGHT - 1) * ((reward / 2 - low / 2) / span))
        for reward in rewards
    ]


def reward_by_request(last: LastRewards) -> dict[str, float | None]:
    """Return the rewards by request: its id is that of its group, a slash and its number."""
    group, rewards = last
    return {f"{group}/{number}": reward for number, reward in enumerate(rewards)}
