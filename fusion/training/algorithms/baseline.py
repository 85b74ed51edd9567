"""Compare rewards with those of their group. Pure, on arrays: rewards float64 [n], and int64 [n] the number of each
sample's group, from 0.

Invariants (tests/training/test_baseline.py): all functions give what their definition gives group by group; a group
whose rewards are all equal (`equal`) gives exact zeros."""

from collections.abc import Hashable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

EQUAL = 1e-6
"""Rewards count as equal within this times the largest of 1 and their magnitudes: the rounding of sums, and the noise
of a reward model in another batch, are no signal."""


@overload
def equal(low: float, high: float) -> bool: ...
@overload
def equal(low: FloatArray, high: FloatArray) -> NDArray[np.bool_]: ...
def equal(low: Any, high: Any) -> Any:
    """Return whether all rewards between the smallest and the largest of a group count as equal."""
    spread = high - low
    return (spread <= EQUAL) | (spread <= EQUAL * abs(low)) | (spread <= EQUAL * abs(high))


def equal_groups(rewards_n: FloatArray, groups_n: IntArray) -> NDArray[np.bool_]:
    """Return for each group, by its number, whether its rewards are all equal."""
    lows = np.full(groups_n.max() + 1 if len(groups_n) else 0, np.inf)
    highs = -lows
    np.minimum.at(lows, groups_n, rewards_n)
    np.maximum.at(highs, groups_n, rewards_n)
    return equal(lows, highs)


def number_groups(groups: Sequence[Hashable]) -> IntArray:
    """Return the number of each sample's group, in the order in which groups first occur."""
    number_by_group = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return np.fromiter(map(number_by_group.__getitem__, groups), np.int64, len(groups))


def subtract_mean(rewards_n: FloatArray, groups_n: IntArray) -> FloatArray:
    """Subtract the mean of the group from each reward; 0 where the rewards of the group are all equal."""
    if not len(rewards_n):
        return rewards_n
    # Relative to one reward of the group, as sums of equal numbers are rounded, and sums of zeros are not.
    anchors = np.empty(groups_n.max() + 1)
    anchors[groups_n] = rewards_n
    relative_n = rewards_n - anchors[groups_n]
    means = np.bincount(groups_n, relative_n) / np.bincount(groups_n)
    return np.where(equal_groups(rewards_n, groups_n)[groups_n], 0.0, relative_n - means[groups_n])


def standard_deviation(centred_n: FloatArray, groups_n: IntArray) -> FloatArray:
    """Return the standard deviation (with n - 1) of each sample's group; 0 in a group of one. ``centred_n``: as
    returned by `subtract_mean`."""
    variances = np.bincount(groups_n, centred_n**2) / np.maximum(np.bincount(groups_n) - 1, 1)
    return np.sqrt(variances)[groups_n]
