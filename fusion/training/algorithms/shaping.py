"""Shape rewards before advantages are computed: overlong penalty and KL. Pure, on arrays: rewards float64 [B]; a
failed reward (NaN) stays NaN."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(
    lengths_B: NDArray[np.int64], longest: int, buffer: int, cut_B: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return 0 up to ``longest`` - ``buffer`` tokens, then decrease linearly to -1 at ``longest`` for responses that
    were cut there. One that has ended with its last token had no need of more: it counts as one token shorter.

    Soft overlong punishment (DAPO, arXiv 2503.14476, section 3.4: L_max is ``longest``, L_cache is ``buffer``).
    """
    if not buffer:
        return np.zeros(len(lengths_B))
    lengths_B = np.where(cut_B, lengths_B, np.minimum(lengths_B, longest - 1))
    return -np.clip((lengths_B - (longest - buffer)) / buffer, 0.0, 1.0)


def subtract_kl(
    rewards_B: NDArray[np.float64], kl_sums_B: NDArray[np.float64], coefficient: float
) -> NDArray[np.float64]:
    """Subtract ``coefficient`` times each sample's log-ratio of behaviour to reference, summed over its tokens, which
    estimates their KL (InstructGPT, arXiv 2203.02155, section 3.5, eq. 2)."""
    return rewards_B - coefficient * kl_sums_B
