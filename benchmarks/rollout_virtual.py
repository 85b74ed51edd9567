"""Run the parts `orders`, `replay` and `rhyme` of `benchmarks/rollout.py`: in virtual time, as a run decides."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple, TypeVar

from benchmarks.harness import Figures, progress
from benchmarks.rollout_workloads import (
    CHUNK_TOKENS,
    HARDWARE,
    MAX_BATCH_TOKENS,
    PROMPT_TOKENS,
    STEP_S,
    STEPS_OF_EPOCH,
    WORKLOADS,
    Workload,
    hardware,
)
from fusion.costmodel.pace import EngineCost, StepSums
from fusion.npu import DeviceConfig
from stalesync.job.config import Config
from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.draft_texts import measured
from stalesync.simulator.drafts import DraftSpec
from stalesync.simulator.lengths import DrawnLengths, SimulatedPrompt
from stalesync.simulator.run import SimulatedRun
from stalesync.simulator.sequence import SimulatedRequest
from stalesync.simulator.setup import SimulationSetup
from stalesync.simulator.work import Bound, SimulatedWork

Case = TypeVar("Case")
Result = TypeVar("Result")

RUNAWAYS = 0.01
"""Share of responses at the maximum, in the runs that have such"""


@dataclass(frozen=True)
class Mode:
    """How requests are scheduled. ``divided``: whether in chunks, with a KV pool."""

    order: str = "fifo"
    divided: bool = True
    drafts: DraftSpec | None = None


REPLAYED = {
    "plain": Mode(divided=False),
    "divided": Mode(),
    "context": Mode("context"),
    "seer": Mode("context", drafts=DraftSpec()),
    "least_generated": Mode("least_generated"),
    "history": Mode("history"),
    "full": Mode("history", drafts=DraftSpec(history=True)),
    "oracle": Mode("oracle"),
}
ORDERS = {
    **{order: Mode(order) for order in ("oracle", "history", "least_generated", "context", "fifo")},
    "history, whole": Mode("history", divided=False),
    "fifo, whole": Mode(divided=False),
}
"""Without chunks: whole"""

QUEUES = {
    "shallow": WORKLOADS["shallow"],
    "even": replace(WORKLOADS["shallow"], max_seqs=64),
    "deep": WORKLOADS["qwen2_vl_72b"],
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


def simulate(workload: Workload, mode: Mode, seed: int, runaways: float = 0.0, epoch: int = 2) -> Rollout:
    """Simulate one iteration. ``epoch``: of its rows; in the first, nothing is known of their lengths."""
    config = config_of(workload, seed, order=mode.order, divided=mode.divided, spread=(*workload.spread, runaways))
    config.rollout.engine.max_seqs = workload.max_seqs // workload.infer.dp
    config.run.steps = 1
    setup = SimulationSetup.of(config, kv_tokens=workload.kv_tokens)
    pace = replace(setup.engine.cost.pace, hardware=hardware(workload))
    cost = PublishedEngineCost(pace, workload.infer, full_batch=config.rollout.engine.max_seqs)
    setup = replace(setup, engine=replace(setup.engine, cost=cost, drafts=mode.drafts))
    forced = forced_lengths(config)
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


def config_of(workload: Workload, seed: int, *, order: str, divided: bool, spread: Sequence[float]) -> Config:
    """Return what all simulated runs of published workloads have in common."""
    config = Config()
    config.device = DeviceConfig("emulated", pace=workload.model, pace_tokens=1, pace_speed=1.0)
    config.cluster.npus, config.cluster.hardware = workload.gpus, "h800"
    config.data.prompts_per_step, config.algorithm.group_size = workload.prompts, workload.group_size
    config.run.seed = seed
    config.training.share_prefixes = "off"  # as the published systems
    for layout in (config.parallel.infer, config.parallel.train):
        layout.tp, layout.ep = workload.infer.tp, workload.infer.ep
    rollout = config.rollout
    rollout.max_response_length, rollout.sampling.forced_median = workload.max_tokens, workload.median_tokens
    rollout.sampling.forced_spread, rollout.engine.max_batch_tokens = [*spread], MAX_BATCH_TOKENS
    rollout.schedule.order, rollout.schedule.chunk_tokens = order, CHUNK_TOKENS if divided else None
    rollout.kv_pool.suspended = "pool" if divided else "recompute"
    return config


def forced_lengths(config: Config) -> ForcedLengths:
    forced = ForcedLengths.of(config.rollout, config.run.seed)
    assert forced is not None
    return forced


def _spread_over_ranks(run: SimulatedRun, num_ranks: int) -> None:
    """Place the requests of an engine on its attention ranks one by one, as vLLM's data-parallel coordinator does: a
    group is bound to an engine, not to a rank."""
    start = run.cards.start

    def spread(number: int, requests: Sequence[SimulatedRequest], version: int, *, stay: bool) -> None:
        placed = [request._replace(kv_rank=index % num_ranks) for index, request in enumerate(requests)]
        start(number, placed, version, stay=stay)

    run.cards.start = spread  # type: ignore[method-assign]


def in_processes(simulate_case: Callable[[Case], Result], cases: Iterable[Case]) -> dict[Case, Result]:
    """Simulate cases on all cores."""
    cases = list(cases)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(cases, pool.map(simulate_case, cases), strict=True))


def compared(baseline: Sequence[float], speeds: Sequence[float], published: float | None = None) -> Figures:
    """Return the ratio of speeds to those of the same seed's baseline, and how far it is from the published one."""
    ratios = [speed / other for speed, other in zip(speeds, baseline, strict=True)]
    figures = {"ratio": mean(ratios), "spread": stdev(ratios) if len(ratios) > 1 else 0.0}
    if published is not None:
        deviation = figures["ratio"] / published - 1
        figures |= {"published": published, "deviation": deviation, "abs_deviation": abs(deviation)}
    return figures


# ---- orders


def _simulate_order(case: tuple[str, str, int, float, int, int]) -> float:
    queue, mode, seed, runaways, epoch, part = case
    rollout = simulate(QUEUES[queue].fewer(part), ORDERS[mode], seed, runaways, epoch=epoch)
    return rollout.tokens / rollout.seconds


def orders(args: Namespace) -> Figures:
    """Simulate every order, in the first and in the second epoch of the rows."""
    queues, seeds = args.queues.split(","), range(1, args.seeds + 1)
    names = [name for name in ORDERS if not args.orders or name in args.orders.split(",")]
    part = args.part_of_requests
    speed = in_processes(_simulate_order, product(queues, names, seeds, (0.0, RUNAWAYS), (1, 2), [part]))
    figures: Figures = {}
    for queue, runaways, epoch in product(queues, (0.0, RUNAWAYS), (1, 2)):
        by_mode = figures[f"{queue}, {runaways:.0%} runaways, epoch {epoch}"] = {}
        for mode in names:
            own, best = ([speed[queue, one, seed, runaways, epoch, part] for seed in seeds] for one in (mode, "oracle"))
            ratios = [one / most for one, most in zip(own, best, strict=True)]
            by_mode[mode] = {"ratio_to_oracle": mean(ratios), "lowest": min(ratios)}
    return figures


# ---- replay


@lru_cache
def drafts_of(drafts: DraftSpec, texts: str) -> DraftSpec:
    """Return the same drafts with the acceptance of recorded responses."""
    return measured(Path(texts), siblings=drafts.siblings, history=drafts.history)


def _simulate_replay(case: tuple[str, str, int, float, int, str]) -> Rollout:
    name, of, seed, runaways, part, texts = case
    mode = REPLAYED[of]
    if texts and mode.drafts is not None:
        mode = replace(mode, drafts=drafts_of(mode.drafts, texts))
    return simulate(WORKLOADS[name].fewer(part), mode, seed, runaways)


def replay(args: Namespace) -> Figures:
    """Replay every workload in every mode, beside what is published."""
    names, seeds, parts = args.workloads.split(","), range(1, args.seeds + 1), [args.part_of_requests]
    cases = [*product(names, REPLAYED, seeds, [0.0], parts, [""])]
    cases += product(names, ("plain", "full"), seeds, [RUNAWAYS], parts, [""])
    if args.texts:
        cases += product(names, ("seer", "full"), seeds, [0.0], parts, [args.texts])
    results = in_processes(_simulate_replay, cases)
    figures: Figures = {}
    for name in names:
        published, ratio = WORKLOADS[name].published, WORKLOADS[name].ratio

        def found(mode: str, runaways: float = 0.0, texts: str = "", name: str = name) -> list[Rollout]:
            return [results[name, mode, seed, runaways, parts[0], texts] for seed in seeds]

        plain = found("plain")
        modes = {mode: replayed(plain, found(mode), ratio.get(mode)) for mode in REPLAYED}
        modes["full_with_runaways"] = replayed(found("plain", RUNAWAYS), found("full", RUNAWAYS))
        for mode in ("seer", "full") if args.texts else ():
            modes[f"{mode}, texts"] = replayed(plain, found(mode, texts=args.texts), ratio.get(mode))
        tail_share = mean(one.tail_s / one.seconds for one in plain)
        modes["plain"] |= {
            "abs_deviation_s": abs(modes["plain"]["seconds"] / published["plain_s"] - 1),
            "abs_deviation_tail_share": abs(tail_share / (published["plain_tail_s"] / published["plain_s"]) - 1),
        }
        modes["published"] = published | {"seer_tail_cut": 1 - published["seer_tail_s"] / published["plain_tail_s"]}
        modes["full_over_seer"] = modes["full"]["ratio"] / modes["seer"]["ratio"]
        modes["perfect_balance"] = mean(one.seconds / one.bound_s for one in plain)
        figures[name] = modes
        progress(f"{name}, full", modes["full"])
    return figures


def replayed(plain: Sequence[Rollout], rollouts: Sequence[Rollout], published: float | None = None) -> Figures:
    """Return a mode's figures, with its ratio to `plain`."""
    figures = compared([1 / one.seconds for one in plain], [1 / one.seconds for one in rollouts], published)
    return figures | {
        "tail_cut": mean(1 - other.tail_s / one.tail_s for one, other in zip(plain, rollouts, strict=True)),
        "seconds": mean(one.seconds for one in rollouts),
        "tail_s": mean(one.tail_s for one in rollouts),
        "preemptions": mean(one.preemptions for one in rollouts),
    }


# ---- rhyme


@dataclass(frozen=True)
class RhymeMode:
    """``divided``: whether in chunks, with a KV pool; ``search``: for shares of the engines, with tail migration."""

    max_staleness: int = 1
    order: str = "histopipe"
    divided: bool = True
    search: bool = True
    drafts: DraftSpec | None = None


OF_HISTORY, OF_BOTH = DraftSpec(siblings=False, history=True), DraftSpec(history=True)
RHYME = {
    "plain": RhymeMode(0, "fifo", divided=False),
    "histopipe": RhymeMode(divided=False, search=False),
    "two_tier": RhymeMode(),
    "histospec": RhymeMode(drafts=OF_HISTORY),
    "stalesync": RhymeMode(order="history"),
    "full": RhymeMode(order="history", drafts=OF_BOTH),
    "full_s2": RhymeMode(2, "history", drafts=OF_BOTH),
}


def _simulate_rhyme(case: tuple[str, int, int, str]) -> float:
    """Simulate two epochs of a mode; return the tokens a second of the second one."""
    name, seed, part, texts = case
    mode, workload = RHYME[name], WORKLOADS["rhyme"].fewer(part)
    drafts = drafts_of(mode.drafts, texts) if texts and mode.drafts is not None else mode.drafts
    config = config_of(workload, seed, order=mode.order, divided=mode.divided, spread=(*workload.spread, 0.0))
    config.data.rows = workload.prompts * STEPS_OF_EPOCH
    # Two steps more than are measured: a run does not admit what it has no step left to train.
    config.run.steps = 2 * STEPS_OF_EPOCH + 2
    config.stalesync.max_staleness = mode.max_staleness
    config.rollout.engine.max_seqs = workload.max_seqs
    setup = SimulationSetup.of(config, kv_tokens=workload.kv_tokens)
    pace = replace(setup.engine.cost.pace, hardware=HARDWARE)
    cost = PublishedEngineCost(pace, setup.engine.cost.layout, full_batch=workload.max_seqs)
    setup = replace(setup, engine=replace(setup.engine, cost=cost, drafts=drafts))
    if (pipe := setup.admission.histopipe) is not None and not mode.search:
        pipe = replace(pipe, search=False, growth=inf)
        setup = replace(setup, admission=replace(setup.admission, histopipe=pipe))
    lengths = DrawnLengths(forced_lengths(config), workload.group_size, PROMPT_TOKENS, config.data.rows)
    steps = SimulatedRun(setup, lengths).run()[STEPS_OF_EPOCH : 2 * STEPS_OF_EPOCH]
    assert all(lag <= mode.max_staleness for step in steps for lag in step.lags)
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def rhyme(args: Namespace) -> Figures:
    """Simulate every mode, beside what is published."""
    seeds, part = range(args.first_seed, args.first_seed + args.seeds), args.part_of_requests
    drafted = [mode for mode in RHYME if args.texts and RHYME[mode].drafts is not None]
    modes = [*product(RHYME, [""]), *product(drafted, [args.texts])]
    speed = in_processes(_simulate_rhyme, [(mode, seed, part, texts) for mode, texts in modes for seed in seeds])
    figures: Figures = {}
    for name, texts in modes:
        own = [speed[name, seed, part, texts] for seed in seeds]
        plain, mode = [speed["plain", seed, part, ""] for seed in seeds], f"{name}, texts" if texts else name
        figures[mode] = compared(plain, own, WORKLOADS["rhyme"].ratio.get(name)) | {"tokens_per_s": mean(own)}
        progress(mode, figures[mode])
    return figures | {"full_over_histospec": figures["full"]["ratio"] / figures["histospec"]["ratio"]}
