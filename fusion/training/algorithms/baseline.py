"""Compare rewards with those of their group. Pure, on arrays: rewards float64 [n], and int64 [n] the number of each
sample's group, from 0.

Invariants (tests/training/test_baseline.py): both functions give what their definition gives group by group; a group
whose rewards are all equal gives exact zeros.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def number_groups(groups: Sequence[Hashable]) -> IntArray:
    """Return the number of each sample's group, in the order in which groups first occur."""
    number_by_group = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return np.fromiter(map(number_by_group.__getitem__, groups), np.int64, len(groups))


def subtract_mean(rewards_n: FloatArray, groups_n: IntArray) -> FloatArray:
    """Subtract the mean of the group from each reward."""
    if not len(rewards_n):
        return rewards_n
    # Relative to one reward of the group, as sums of equal numbers are rounded, and sums of zeros are not.
    anchors = np.empty(groups_n.max() + 1)
    anchors[groups_n] = rewards_n
    relative_n = rewards_n - anchors[groups_n]
    means = np.bincount(groups_n, relative_n) / np.bincount(groups_n)
    return relative_n - means[groups_n]


def standard_deviation(centred_n: FloatArray, groups_n: IntArray) -> FloatArray:
    """Return the standard deviation (with n - 1) of each sample's group; 0 in a group of one.

    Args:
        centred_n: as returned by `subtract_mean`.
    """
    variances = np.bincount(groups_n, centred_n**2) / np.maximum(np.bincount(groups_n) - 1, 1)
    return np.sqrt(variances)[groups_n]
