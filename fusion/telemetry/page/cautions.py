"""State what is wrong or suspicious in a run, from its metrics and groups. Pure.

Every caution names the metric or the file it is about, so that it can be checked; each bound is a constant here."""

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fusion.telemetry.memory import MemoryLedger, human_bytes
from fusion.telemetry.page.curves import number
from fusion.telemetry.page.distributions import WINDOW_SHARE

FULL_HBM = 0.95
"""Share of the capacity from which a phase is close to running out of memory."""
TURNS = "env/num_turns/mean"
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
EQUAL_GROUPS = 0.8
"""Share of groups with equal rewards above which most of the generation is in vain."""
ENDED_WELL = ("trained", "filtered")

RECENT = 10
"""Number of steps whose mean is checked during the run"""
SAMPLE_SIZE, GAP = "rollout_corr/rollout_is_eff_sample_size", "staleness/0/rollout_logprobs_diff_mean"
SKIPPED, FAILED, PREEMPTED = "training/skipped_updates", "reward/failed", "rollout/preemptions"
TOTALS = (SKIPPED, FAILED, PREEMPTED)
"""Metrics that are counts of a step."""
TERM_STD = re.compile(r"critic/rewards/[^/]+/std")

Caution = tuple[str, str]
"""The metric or file that a caution is about, and its sentence."""


def cautions(
    rows: Sequence[Mapping[str, Any]], ended: Mapping[str, int], memory: MemoryLedger, failure: str | None
) -> list[str]:
    """Return one sentence for each caution, the most serious first.
    ``rows``: of metrics.jsonl.
    ``ended``: number of groups by how they ended.
    ``failure``: why the run failed, in one line; None: it did not."""
    failed = [f"the run failed: {failure}"] if failure else []
    named = [*_not_finite(rows), *_lost(rows, ended), *_memory(rows, memory), *_learning(rows), *_speed(rows)]
    return failed + [_sentence(caution) for caution in named]


class CautionWatch:
    """Find cautions during a run, each once. Memory does not grow with the number of steps.

    What is lost or not finite is found in its step, what a step's metrics show when `RECENT` steps show it on average.
    """

    def __init__(self) -> None:
        self._first: Mapping[str, float] = {}
        self._recent: deque[Mapping[str, float]] = deque(maxlen=RECENT)
        self._totals = dict.fromkeys(TOTALS, 0.0)
        self._known = set[str]()

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Add the metrics of a step; return the new cautions."""
        broken = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
        finite = {name: value for name, value in metrics.items() if name not in broken}
        self._first = self._first or finite
        self._recent.append(finite)
        for name in TOTALS:
            self._totals[name] += finite.get(name, 0.0)
        named = [*_not_finite([{"step": step, "not_finite": broken}]), *_lost([self._totals], {})]
        if len(self._recent) == RECENT:
            names = {name for row in self._recent for name in row if name not in TOTALS}
            mean = {name: value for name in names if (value := _mean(self._recent, name)) is not None}
            named += [*_learning([self._first, mean]), *_speed([mean])]
        new = [caution for caution in named if caution[0] not in self._known]
        self._known |= {about for about, _ in new}
        return [_sentence(caution) for caution in new]


def _sentence(caution: Caution) -> str:
    about, text = caution
    return text if text.startswith(about) else f"{text} ({about})"


def _not_finite(rows: Sequence[Mapping[str, Any]]) -> Iterator[Caution]:
    first: dict[str, tuple[Any, int]] = {}
    for row in rows:
        broken = row.get("not_finite")
        for name in broken if isinstance(broken, Mapping) else ():
            step, count = first.get(name, (row.get("step"), 0))
            first[name] = step, count + 1
    for name, (step, count) in first.items():
        steps = "one step" if count == 1 else f"{count} steps"
        yield name, f"{name} is not finite in {steps}, first in step {step}"


def _lost(rows: Sequence[Mapping[str, Any]], ended: Mapping[str, int]) -> Iterator[Caution]:
    if skipped := _total(rows, SKIPPED):
        yield SKIPPED, f"{skipped:,.0f} updates were skipped, as their gradients were not finite"
    for how, count in ended.items():
        if how.partition(":")[0] not in ENDED_WELL:
            yield "groups.jsonl", f"{count:,} groups ended as {how}"
    if failed := _total(rows, FAILED):
        yield FAILED, f"{failed:,.0f} responses could not be scored"


def _memory(rows: Sequence[Mapping[str, Any]], memory: MemoryLedger) -> Iterator[Caution]:
    for phase, peak in memory.peak.items():
        if memory.capacity and peak >= FULL_HBM * memory.capacity:
            of = f"{human_bytes(peak)} of {human_bytes(memory.capacity)}"
            yield f"memory/{phase}/peak_mib", f"HBM was {peak / memory.capacity:.0%} full in the phase {phase}: {of}"
    if preempted := _total(rows, PREEMPTED):
        yield PREEMPTED, f"{preempted:,.0f} requests were preempted, as the KV cache was full"


def _learning(rows: Sequence[Mapping[str, Any]]) -> Iterator[Caution]:
    def at_end(name: str) -> float:
        return math.nan if (value := _at_end(rows, name)) is None else value  # no comparison with NaN holds

    clipped, equal = at_end("response_length/clip_ratio"), at_end("frac_reward_zero_std")
    if clipped > CLIPPED:
        limit, cause = "rollout.max_response_length", ""
        if not math.isnan(at_end(TURNS)):
            limit += " or environment.max_turns"
        elif clipped == 1:
            cause = "; none ends by itself: check the model's end token, or set rollout.sampling.stop"
        yield "response_length/clip_ratio", f"{clipped:.0%} of the responses are cut at {limit} at the end{cause}"
    if at_end("critic/rewards/std") == 0:
        yield "critic/rewards/std", "all rewards of a step are equal at the end, so there is nothing to learn"
    elif equal > EQUAL_GROUPS:
        yield "frac_reward_zero_std", f"{equal:.0%} of the groups have equal rewards at the end, and teach nothing"
    for name in dict.fromkeys(name for row in rows[-1:] for name in row if TERM_STD.fullmatch(name)):
        if at_end(name) == 0:
            yield name, f"the reward term {name.split('/')[2]!r} is the same for all responses at the end"
    if at_end("actor/grad_norm") == 0:
        yield "actor/grad_norm", "the gradient is zero at the end"
    start, end = _at_end(rows[::-1], "actor/entropy"), _at_end(rows, "actor/entropy")
    if start is not None and end is not None and start > 0 and end < COLLAPSED * start:
        yield "actor/entropy", f"the entropy fell from {start:.3g} to {end:.3g}"
    if (size := at_end(SAMPLE_SIZE)) < LOW_SAMPLE_SIZE:
        yield SAMPLE_SIZE, f"the effective sample size is {size:.0%} at the end: few tokens dominate the update"
    if (gap := at_end(GAP)) > MISMATCH:
        yield GAP, f"engine and trainer differ by {gap:.3g} nats per token with the same weights"


def _speed(rows: Sequence[Mapping[str, Any]]) -> Iterator[Caution]:
    busy = _at_end(rows, "perf/utilisation")
    if busy is not None and busy < IDLE_CARDS:
        yield "perf/utilisation", f"the cards are busy only {busy:.0%} of the time at the end"


def _at_end(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return _mean(rows[-max(1, len(rows) // WINDOW_SHARE) :], name)


def _mean(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [value for row in rows if (value := number(row.get(name))) is not None]
    return sum(values) / len(values) if values else None


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(number(row.get(name)) or 0 for row in rows)
