"""State what is wrong or suspicious in a run, from its metrics and groups. Pure.

Every caution names the metric or the file it is about, so that it can be checked; each bound is a constant here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusion.telemetry.memory import MemoryLedger, human_bytes
from fusion.telemetry.page.curves import number

WINDOW_SHARE = 10
"""A value "at the end" is the mean of the last of this many equal parts of the steps."""

FULL_HBM = 0.95
"""Share of the capacity from which a phase is close to running out of memory."""

CLIPPED = 0.2
"""Share of responses cut at the maximum length above which lengths, and rewards with them, are distorted."""

COLLAPSED = 0.1
"""Entropy at the end, as a share of that at the start, below which the policy has hardly anything to explore."""

LOW_SAMPLE_SIZE = 0.3
"""Effective sample size of the importance weights below which few tokens dominate the update."""

MISMATCH = 0.05
"""Mean difference of log-probabilities between engine and trainer, in nats, above which they compute something else."""

IDLE_CARDS = 0.5
"""Busy share of the cards below which they mostly wait."""

ENDED_WELL = ("trained", "filtered")


def cautions(
    rows: Sequence[Mapping[str, Any]], ended: Mapping[str, int], memory: MemoryLedger, failure: str | None
) -> list[str]:
    """Return one sentence for each caution, the most serious first.

    Args:
        rows: of metrics.jsonl.
        ended: number of groups by how they ended.
        failure: why the run failed, in one line; None: it did not.
    """
    found = [f"the run failed: {failure}"] if failure else []
    return [*found, *_not_finite(rows), *_lost(rows, ended), *_memory(rows, memory), *_learning(rows), *_speed(rows)]


def _not_finite(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    first: dict[str, tuple[Any, int]] = {}
    for row in rows:
        broken = row.get("not_finite")
        for name in broken if isinstance(broken, Mapping) else ():
            step, count = first.get(name, (row.get("step"), 0))
            first[name] = step, count + 1
    for name, (step, count) in first.items():
        yield f"{name} is not finite in {_steps(count)}, first in step {step}"


def _lost(rows: Sequence[Mapping[str, Any]], ended: Mapping[str, int]) -> Iterator[str]:
    for how, count in ended.items():
        if how.partition(":")[0] not in ENDED_WELL:
            yield f"{count:,} groups ended as {how} (groups.jsonl)"
    if failed := _total(rows, "reward/failed"):
        yield f"{failed:,.0f} responses could not be scored (reward/failed)"


def _memory(rows: Sequence[Mapping[str, Any]], memory: MemoryLedger) -> Iterator[str]:
    for phase, peak in memory.peak.items():
        if memory.capacity and peak >= FULL_HBM * memory.capacity:
            yield (
                f"HBM was {peak / memory.capacity:.0%} full in the phase {phase}: {human_bytes(peak)} of "
                f"{human_bytes(memory.capacity)} (memory/{phase}/peak_mib)"
            )
    if preempted := _total(rows, "rollout/preemptions"):
        yield f"{preempted:,.0f} requests were preempted, as the KV cache was full (rollout/preemptions)"


def _learning(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    clipped = _at_end(rows, "response_length/clip_ratio")
    if clipped is not None and clipped > CLIPPED:
        yield (
            f"{clipped:.0%} of the responses are cut at rollout.max_response_length at the end "
            "(response_length/clip_ratio)"
        )
    if _at_end(rows, "critic/rewards/std") == 0:
        yield "all rewards of a step are equal at the end, so there is nothing to learn (critic/rewards/std)"
    start, end = _at_end(rows[::-1], "actor/entropy"), _at_end(rows, "actor/entropy")
    if start is not None and end is not None and start > 0 and end < COLLAPSED * start:
        yield f"the entropy fell from {start:.3g} to {end:.3g} (actor/entropy)"
    size = _at_end(rows, "rollout_corr/rollout_is_eff_sample_size")
    if size is not None and size < LOW_SAMPLE_SIZE:
        yield (
            f"the effective sample size is {size:.0%} at the end: few tokens dominate the update "
            "(rollout_corr/rollout_is_eff_sample_size)"
        )
    gap = _at_end(rows, "staleness/0/rollout_logprobs_diff_mean")
    if gap is not None and gap > MISMATCH:
        yield (
            f"engine and trainer differ by {gap:.3g} nats per token with the same weights "
            "(staleness/0/rollout_logprobs_diff_mean)"
        )


def _speed(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    busy = _at_end(rows, "perf/utilisation")
    if busy is not None and busy < IDLE_CARDS:
        yield f"the cards are busy only {busy:.0%} of the time at the end (perf/utilisation)"


def _at_end(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    window = rows[-max(1, len(rows) // WINDOW_SHARE) :]
    values = [value for row in window if (value := number(row.get(name))) is not None]
    return sum(values) / len(values) if values else None


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(number(row.get(name)) or 0 for row in rows)


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"
