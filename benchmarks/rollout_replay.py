"""Run the part `replay` of `benchmarks/rollout.py`: published rollouts in virtual time, by the decisions of a run.

    mode               requests                                                  drafts
    plain              whole responses, oldest first; a group is bound to an     none
                       engine at the start (veRL)
    divided            in chunks, with a KV pool, oldest first                   none
    context            … in Seer's order                                         none
    seer               … in Seer's order                                         of siblings
    least_generated, history, oracle: … in these orders                          none
    full               … in the order `history`                                  of siblings and of the last epoch

Every run is the second epoch of the same rows, whose first epoch only the order `history` and drafts of the last epoch
know. All modes of a seed have the same lengths. Ratios are those of tokens per second; spread is their standard
deviation over seeds. The bound is perfect balance: every engine decodes full batches without a pause or draft.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, stdev
from typing import Any, NamedTuple

from benchmarks.rollout_workloads import (
    CHUNK_TOKENS,
    MAX_BATCH_TOKENS,
    PROMPT_TOKENS,
    STEP_S,
    WORKLOADS,
    Replayed,
    Workload,
    hardware,
)
from fusion.costmodel.pace import EngineCost, StepSums
from fusion.npu import DeviceConfig
from stalesync.job.config import Config
from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.drafts import DraftSpec
from stalesync.simulator.lengths import SimulatedPrompt
from stalesync.simulator.run import SimulatedRun
from stalesync.simulator.sequence import SimulatedRequest
from stalesync.simulator.setup import SimulationSetup
from stalesync.simulator.work import Bound, SimulatedWork

RUNAWAYS = 0.01
"""Share of responses at the maximum, in the runs that have such"""

TARGETS = {"moonlight": 2.2, "qwen2_vl_72b": 2.2, "kimi_k2": 1.6}
"""Lower bounds of the ratio of `full`"""
TAIL_CUT, TAIL_CUT_RUNAWAYS, OVER_SEER = 0.80, 0.70, 1.08


@dataclass(frozen=True)
class Mode:
    """How requests are scheduled. ``order``: a key of `ORDERS`; ``divided``: whether in chunks, with a KV pool."""

    order: str = "fifo"
    divided: bool = True
    drafts: DraftSpec | None = None


MODES = {
    "plain": Mode(divided=False),
    "divided": Mode(),
    "context": Mode("context"),
    "seer": Mode("context", drafts=DraftSpec()),
    "least_generated": Mode("least_generated"),
    "history": Mode("history"),
    "full": Mode("history", drafts=DraftSpec(history=True)),
    "oracle": Mode("oracle"),
}


class PublishedEngineCost(EngineCost):
    """Costs the published engine, whose steps take `STEP_S` more."""

    def step_s(self, sums: StepSums) -> float:
        return super().step_s(sums) + STEP_S

    def decode_lines(self, batch: int, drafted: int = 0) -> list[tuple[float, float]]:
        return [(fixed + STEP_S, slope) for fixed, slope in super().decode_lines(batch, drafted)]


class SecondEpoch:
    """The prompts of a second epoch, named as in a run."""

    def __init__(self, forced: ForcedLengths, workload: Workload) -> None:
        self._forced, self._members, self._taken = forced, range(workload.group_size), 0

    def next(self, count: int) -> list[SimulatedPrompt]:
        names = [f"e1-{row}" for row in range(self._taken, self._taken + count)]
        self._taken += count
        lengths = self._forced.of_groups(names, self._members)
        return [SimulatedPrompt(name, PROMPT_TOKENS, own) for name, own in zip(names, lengths, strict=True)]


class Rollout(NamedTuple):
    """One iteration's rollout. ``tail_s``: in which at most a tenth of the requests is left; ``bound_s``: with perfect
    balance; ``tokens``: generated."""

    seconds: float
    tail_s: float
    bound_s: float
    tokens: int
    preemptions: int


def simulate(workload: Workload, mode: Mode, seed: int, runaways: float = 0.0, *, epoch: int = 2) -> Rollout:
    """Simulates one iteration. ``epoch``: of its rows; in the first, nothing is known of their lengths."""
    config = _config(workload, mode, seed, runaways)
    setup = SimulationSetup.of(config, kv_tokens=workload.kv_tokens)
    pace = replace(setup.engine.cost.pace, hardware=hardware(workload))
    cost = PublishedEngineCost(pace, workload.infer, full_batch=config.rollout.max_seqs)
    setup = replace(setup, engine=replace(setup.engine, cost=cost, drafts=mode.drafts))
    forced = ForcedLengths.of(config.rollout, seed)
    assert forced is not None
    run = SimulatedRun(setup, SecondEpoch(forced, workload))
    if mode.order == "history" and epoch > 1:
        rows = [f"e0-{row}" for row in range(workload.prompts)]
        for row, lengths in enumerate(forced.of_groups(rows, range(workload.group_size))):
            run.admission.buffer.history.observe(row, str(row), lengths)
        run.admission.buffer.history.end_step()
    if not mode.divided:
        _spread_over_ranks(run, setup.engine.num_ranks)
    run.admission.observe_kv_tokens(workload.kv_tokens * setup.engine.num_ranks)
    (step,) = run.run()
    work = SimulatedWork(0.0, step.work.contexts, step.work.prefilled, step.work.prefill_pairs)
    work.decodes = step.work.decodes
    return Rollout(
        seconds=step.generate_s,
        tail_s=step.tail_s,
        bound_s=Bound(setup)(work).generation / workload.gpus
        + STEP_S * work.decodes / (workload.max_seqs * workload.engines),
        tokens=step.tokens - workload.requests * PROMPT_TOKENS,
        preemptions=run.totals().preemptions,
    )


def replay(args: argparse.Namespace) -> dict[str, Any]:
    """Replays every workload in every mode, and prints what is published beside it."""
    seeds = range(1, args.seeds + 1)
    names = args.workloads.split(",")
    cases = [(*case, 0.0) for case in product(names, MODES, seeds)]
    cases += [(*case, RUNAWAYS) for case in product(names, ("plain", "full"), seeds)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(cases, pool.map(_simulate, cases), strict=True))
    figures: dict[str, Any] = {}
    for name in names:
        workload = WORKLOADS[name]
        plain = [results[name, "plain", seed, 0.0] for seed in seeds]
        figures[name] = {
            mode: _compared(plain, [results[name, mode, seed, 0.0] for seed in seeds], workload, mode) for mode in MODES
        }
        wild = {mode: [results[name, mode, seed, RUNAWAYS] for seed in seeds] for mode in ("plain", "full")}
        figures[name]["full_with_runaways"] = _compared(wild["plain"], wild["full"], workload, "")
        figures[name]["bound"] = {"ratio": mean(one.seconds / one.bound_s for one in plain)}
        print("\n".join(_lines(name, workload, figures[name])), flush=True)
    return figures


def misses(figures: dict[str, Any]) -> list[str]:
    """Returns a line for each target that is missed."""
    lines = []
    for name, least in TARGETS.items():
        if name not in figures:
            continue
        full, seer, wild = (figures[name][mode] for mode in ("full", "seer", "full_with_runaways"))
        checks = (
            ("ratio of full", full["ratio"], least),
            ("full over seer", full["ratio"] / seer["ratio"], OVER_SEER),
            ("tail cut of full", full["tail_cut"], TAIL_CUT),
            (f"tail cut of full with {RUNAWAYS:.0%} runaways", wild["tail_cut"], TAIL_CUT_RUNAWAYS),
        )
        lines += [f"{name}: {what} {value:.3f}, target {least}" for what, value, least in checks if value < least]
    held_out = figures.get("qwen2_vl_72b")
    if held_out is None:
        return lines
    for what, deviation, most in (
        ("total of plain", held_out["plain"]["deviation_s"], 0.20),
        ("tail share of plain", held_out["plain"]["deviation_tail_share"], 0.20),
        ("ratio of divided", held_out["divided"]["deviation"], 0.10),
    ):
        if abs(deviation) > most:
            lines.append(f"qwen2_vl_72b: {what} deviates by {deviation:+.1%}, target {most:.0%}")
    return lines


def _simulate(case: tuple[str, str, int, float]) -> Rollout:
    name, mode, seed, runaways = case
    return simulate(WORKLOADS[name], MODES[mode], seed, runaways)


def _compared(plain: Sequence[Rollout], rollouts: Sequence[Rollout], workload: Replayed, mode: str) -> dict[str, float]:
    ratios = [one.seconds / other.seconds for one, other in zip(plain, rollouts, strict=True)]
    figures = {
        "ratio": mean(ratios),
        "spread": stdev(ratios) if len(ratios) > 1 else 0.0,
        "tail_cut": mean(1 - other.tail_s / one.tail_s for one, other in zip(plain, rollouts, strict=True)),
        "seconds": mean(one.seconds for one in rollouts),
        "tail_s": mean(one.tail_s for one in rollouts),
        "preemptions": mean(one.preemptions for one in rollouts),
    }
    published = workload.published
    if mode == "plain":
        figures["published_s"], figures["published_tail_s"] = published.plain_s, published.plain_tail_s
        share = mean(one.tail_s / one.seconds for one in rollouts)
        figures["deviation_s"] = figures["seconds"] / published.plain_s - 1
        figures["deviation_tail_share"] = share / (published.plain_tail_s / published.plain_s) - 1
    if (ratio := published.ratio.get(mode)) is not None:
        figures["published"], figures["deviation"] = ratio, figures["ratio"] / ratio - 1
    return figures


def _lines(name: str, workload: Replayed, figures: dict[str, dict[str, float]]) -> list[str]:
    plain = figures["plain"]
    lines = [
        f"replay, {name}: plain {plain['seconds']:.0f} s (published {plain['published_s']:.0f}, "
        f"{plain['deviation_s']:+.1%}), its tail {plain['tail_s']:.0f} s (published {plain['published_tail_s']:.0f}; "
        f"share {plain['deviation_tail_share']:+.1%}); perfect balance {figures['bound']['ratio']:.2f} x"
    ]
    for mode, one in figures.items():
        if mode in ("plain", "bound"):
            continue
        published = f", published {one['published']:.2f}: {one['deviation']:+.1%}" if "published" in one else ""
        cut = f"tail cut {one['tail_cut']:.2f}"
        if mode == "seer":
            cut += f" (published {1 - workload.published.seer_tail_s / workload.published.plain_tail_s:.2f})"
        lines.append(f"  {mode:18} {one['ratio']:.2f} x ± {one['spread']:.2f}{published}; {cut}")
    return lines


def _config(workload: Workload, mode: Mode, seed: int, runaways: float) -> Config:
    config = Config()
    config.device = DeviceConfig("emulated", pace=workload.model, pace_tokens=1, pace_speed=1.0)
    config.cluster.npus, config.cluster.hardware = workload.gpus, "h800"
    config.data.prompts_per_step, config.algorithm.group_size = workload.prompts, workload.group_size
    config.run.steps, config.run.seed = 1, seed
    for layout in (config.parallel.infer, config.parallel.train):
        layout.tp, layout.ep = workload.infer.tp, workload.infer.ep
    rollout = config.rollout
    rollout.max_response_length, rollout.forced_median = workload.max_tokens, workload.median_tokens
    rollout.forced_spread = [*workload.spread, runaways]
    rollout.max_seqs, rollout.max_batch_tokens = workload.max_seqs // workload.infer.dp, MAX_BATCH_TOKENS
    rollout.order, rollout.chunk_tokens = mode.order, CHUNK_TOKENS if mode.divided else None
    rollout.suspended_kv = "pool" if mode.divided else "recompute"
    return config


def _spread_over_ranks(run: SimulatedRun, num_ranks: int) -> None:
    """Places the requests of an engine on its attention ranks one by one, as vLLM's data-parallel coordinator does: a
    group is bound to an engine, not to a rank."""
    start = run.cards.start

    def spread(number: int, requests: Sequence[SimulatedRequest], version: int, *, stay: bool) -> None:
        placed = [request._replace(kv_rank=index % num_ranks) for index, request in enumerate(requests)]
        start(number, placed, version, stay=stay)

    run.cards.start = spread  # type: ignore[method-assign]
