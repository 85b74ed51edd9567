"""Shape rewards before advantages are computed: overlong penalty and KL. Pure, one number per sample; a failed reward
(None) stays None."""

from __future__ import annotations

from collections.abc import Sequence


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Return 0 up to ``longest`` - ``buffer`` tokens, then decrease linearly to -1 at ``longest``.

    Soft overlong punishment (DAPO, arXiv 2503.14476, section 3.4: L_max is ``longest``, L_cache is ``buffer``).
    """
    if not buffer:
        return 0.0
    return -min(1.0, max(0.0, (length - (longest - buffer)) / buffer))


def penalise_overlong(
    rewards: Sequence[float | None], lengths: Sequence[int], longest: int, buffer: int
) -> list[float | None]:
    """Add `overlong_penalty` to the rewards. ``lengths``: of the responses, in tokens."""
    pairs = zip(rewards, lengths, strict=True)
    return [None if reward is None else reward + overlong_penalty(length, longest, buffer) for reward, length in pairs]


def subtract_kl(rewards: Sequence[float | None], kl_sums: Sequence[float], coefficient: float) -> list[float | None]:
    """Subtract ``coefficient`` times each sample's log-ratio of behaviour to reference, summed over its tokens, which
    estimates their KL (InstructGPT, arXiv 2203.02155, section 3.5, eq. 2)."""
    pairs = zip(rewards, kl_sums, strict=True)
    return [None if reward is None else reward - coefficient * kl for reward, kl in pairs]
