"""Compare the fields that a reward requires with those of the data rows. Pure."""

from __future__ import annotations

from collections.abc import Collection

from fusion.rewards.config import RewardConfig


def check_required_fields(reward: RewardConfig, required: Collection[str], everywhere: Collection[str]) -> None:
    """Check that every row has the fields without which the reward cannot be called.

    Args:
        required: fields that the reward requires (`RewardPool.required_fields`).
        everywhere: fields that every row has, besides prompt and answer.

    Raises:
        ValueError: names the reward, the fields that some row lacks, and the fields that every row has.
    """
    if missing := sorted({*required} - {*everywhere}):
        raise ValueError(
            f"reward.path={reward.path!r}: the reward requires the field {' and '.join(map(repr, missing))}, which the "
            f"data lacks in some or all rows. Besides prompt and answer, every row has: "
            f"{', '.join(sorted(everywhere)) or 'no field'}. Give the parameter a default, or add the field to the data"
        )
