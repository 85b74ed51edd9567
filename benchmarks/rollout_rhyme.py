"""Run the part `rhyme` of `benchmarks/rollout.py`: RhymeRL's ablation (arXiv 2508.18588) in virtual time.

    mode        staleness  requests                                                 drafts
    plain       0          whole responses; a group is bound to an engine (veRL)    none
    histopipe   1          … to one of its class, engines shared out evenly         none
    two_tier    1          … shares by search; in chunks, with tail migration       none
    histospec   1          as two_tier                                              of the last epoch
    stalesync   1          in chunks, with a KV pool, in the order `history`        none
    full        1          as stalesync                                             of siblings and the last epoch
    full_s2     2          as full                                                  of siblings and the last epoch

Every run has two epochs of the same rows and two steps beyond them; the first teaches the lengths, the second is
measured, end to end. A ratio is that of tokens a second, to `plain` of the same seed; nothing is fitted to one. Drafts
of the last epoch are modelled in the first one, too, which is not measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from statistics import mean, stdev
from typing import Any

from benchmarks.rollout_replay import PublishedEngineCost
from benchmarks.rollout_workloads import CHUNK_TOKENS, MAX_BATCH_TOKENS, MAX_SEQS, PROMPT_TOKENS, RHYME, SPREAD
from fusion.npu import DeviceConfig
from stalesync.job.config import Config
from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.drafts import DraftSpec
from stalesync.simulator.lengths import DrawnLengths
from stalesync.simulator.run import SimulatedRun
from stalesync.simulator.setup import SimulationSetup


@dataclass(frozen=True)
class Mode:
    """``divided``: whether in chunks, with a KV pool; ``search``: for shares of the engines, with tail migration."""

    max_staleness: int = 1
    order: str = "histopipe"
    divided: bool = True
    search: bool = True
    drafts: DraftSpec | None = None


AHEAD = 1.01
"""Lower bound of the ratio of `full` to that of `histospec`: less is no difference"""

OF_HISTORY, OF_BOTH = DraftSpec(siblings=False, history=True), DraftSpec(history=True)

MODES = {
    "plain": Mode(0, "fifo", divided=False),
    "histopipe": Mode(divided=False, search=False),
    "two_tier": Mode(),
    "histospec": Mode(drafts=OF_HISTORY),
    "stalesync": Mode(order="history"),
    "full": Mode(order="history", drafts=OF_BOTH),
    "full_s2": Mode(2, "history", drafts=OF_BOTH),
}


def simulate(mode: Mode, seed: int) -> float:
    """Simulates two epochs; returns the tokens a second of the second one."""
    workload, config = RHYME, _config(mode, seed)
    setup = SimulationSetup.of(config, kv_tokens=workload.kv_tokens)
    cost = PublishedEngineCost(setup.engine.cost.pace, setup.engine.cost.layout, full_batch=MAX_SEQS)
    setup = replace(setup, engine=replace(setup.engine, cost=cost, drafts=mode.drafts))
    if (pipe := setup.admission.histopipe) is not None and not mode.search:
        pipe = replace(pipe, search=False, growth=inf)
        setup = replace(setup, admission=replace(setup.admission, histopipe=pipe))
    forced = ForcedLengths.of(config.rollout, seed)
    assert forced is not None
    run = SimulatedRun(setup, DrawnLengths(forced, workload.group_size, PROMPT_TOKENS, config.data.rows))
    steps = run.run()[workload.steps_of_epoch : 2 * workload.steps_of_epoch]
    assert all(lag <= mode.max_staleness for step in steps for lag in step.lags)
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def rhyme(args: argparse.Namespace) -> dict[str, Any]:
    """Simulates every mode, and prints what is published beside it."""
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    cases = list(product(MODES, seeds))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        speeds = dict(zip(cases, pool.map(_simulate, cases), strict=True))
    figures: dict[str, Any] = {}
    for mode in MODES:
        one = figures[mode] = compared(
            [speeds["plain", seed] for seed in seeds], [speeds[mode, seed] for seed in seeds], RHYME.published.get(mode)
        )
        published = f", published {one['published']:.2f}: {one['deviation']:+.1%}" if "published" in one else ""
        speed = f"{one['tokens_per_s']:9,.0f} tokens/s, {one['ratio']:.2f} x ± {one['spread']:.2f}"
        print(f"rhyme, {mode:10} {speed}{published}", flush=True)
    return figures


def compared(plain: Sequence[float], speeds: Sequence[float], published: float | None) -> dict[str, float]:
    """Returns a mode's speed and its ratio to `plain`, in tokens a second by seed."""
    ratios = [speed / other for speed, other in zip(speeds, plain, strict=True)]
    figures = {
        "ratio": mean(ratios),
        "spread": stdev(ratios) if len(ratios) > 1 else 0.0,
        "tokens_per_s": mean(speeds),
    }
    if published is not None:
        figures["published"], figures["deviation"] = published, figures["ratio"] / published - 1
    return figures


def misses(figures: dict[str, Any]) -> list[str]:
    """Returns a line for each target that is missed."""
    full, histospec = figures["full"]["ratio"], figures["histospec"]["ratio"]
    return [] if full > AHEAD * histospec else [f"full {full:.2f}, target: over {AHEAD} x histospec, {histospec:.2f}"]


def _simulate(case: tuple[str, int]) -> float:
    mode, seed = case
    return simulate(MODES[mode], seed)


def _config(mode: Mode, seed: int) -> Config:
    workload, config = RHYME, Config()
    config.device = DeviceConfig("emulated", pace=workload.model, pace_tokens=1, pace_speed=1.0)
    config.cluster.npus, config.cluster.hardware = workload.gpus, "h800"
    config.data.prompts_per_step, config.algorithm.group_size = workload.prompts, workload.group_size
    config.data.rows = workload.prompts * workload.steps_of_epoch
    # Two steps more than are measured: a run does not admit what it has no step left to train.
    config.run.steps, config.run.seed = 2 * workload.steps_of_epoch + 2, seed
    config.stalesync.max_staleness = mode.max_staleness
    for layout in (config.parallel.infer, config.parallel.train):
        layout.tp = workload.tp
    rollout = config.rollout
    rollout.max_response_length, rollout.forced_median = workload.max_tokens, workload.median_tokens
    rollout.forced_spread = [*SPREAD, 0.0]
    rollout.max_seqs, rollout.max_batch_tokens = MAX_SEQS, MAX_BATCH_TOKENS
    rollout.order, rollout.chunk_tokens = mode.order, CHUNK_TOKENS if mode.divided else None
    rollout.suspended_kv = "pool" if mode.divided else "recompute"
    return config
