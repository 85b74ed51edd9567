"""Measure how requests are scheduled on engines.

orders: every order in virtual time, with and without runaways: a hundredth of the responses at the maximum, 5 to 8
times the mean, which nothing foretells. Relative to `oracle` with chunks; mean and lowest of the seeds.

    workload   requests            engines          sequences that an engine decodes   queue
    shallow    64 x 8, OLMoE-7B    4 of two dies    16 (8 a rank)                      8 requests a sequence
    even       the same            the same         64                                 2
    deep       600 x 16, 72B       16 of 8 dies     256                                2.3, responses 20 times as long

replay: three published rollouts in virtual time, by the decisions of a run, with every published ratio beside ours
(constants in `rollout_workloads.py`). Every run is the second epoch of the same rows, whose first epoch only the order
`history` and drafts of the last epoch know. Ratios are those of tokens per second; spread is their standard deviation
over seeds. The bound is perfect balance: every engine decodes full batches without a pause or draft. Modes: plain:
whole responses, oldest first, a group bound to an engine at the start (veRL); divided: in chunks, with a KV pool;
context, least_generated, history, oracle: divided in these orders (context is Seer's); seer: context with drafts of
siblings; full: history with drafts of siblings and of the last epoch.

rhyme: RhymeRL's ablation (arXiv 2508.18588) in virtual time. Every run has two epochs of the same rows and two steps
beyond them; the first teaches the lengths, the second is measured, end to end. Nothing is fitted to a ratio. Drafts of
the last epoch are modelled in the first one, too, which is not measured. Modes, at staleness 1 but for plain (0) and
full_s2 (2): histopipe: whole responses, to an engine of their class, engines shared out evenly; two_tier: shares by
search, in chunks, with tail migration; histospec: with drafts of the last epoch; stalesync: in chunks, with a KV pool,
in the order `history`; full, full_s2: with drafts of siblings and the last epoch.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, TypeVar

from benchmarks.harness import Arguments, Benchmark, Figures, Option, progress

BENCHMARK = Benchmark(
    __doc__,
    [
        Option("seeds", 10, smoke=1, help="seeds of `orders`, `replay` and `rhyme`"),
        Option("first_seed", 1, help="first seed of `rhyme`"),
        Option("max_tokens", 0, help="of `rhyme`: maximum length of responses; 0: as published"),
        Option("workloads", "moonlight,qwen2_vl_72b,kimi_k2", smoke="moonlight", help="of `replay`"),
        Option("texts", "", help="of `replay`, `rhyme`: recorded responses, whose acceptance of drafts is used, too"),
    ],
    "orders.*.history.ratio_to_oracle >= 0.92, replay.moonlight.full.ratio >= 2.2, "
    "replay.qwen2_vl_72b.full.ratio >= 2.2, replay.kimi_k2.full.ratio >= 1.6, replay.*.full.tail_cut >= 0.80, "
    "replay.*.full_with_runaways.tail_cut >= 0.70, replay.*.full_over_seer >= 1.08, "
    "replay.qwen2_vl_72b.plain.abs_deviation_* <= 0.20, "
    "replay.qwen2_vl_72b.divided.abs_deviation <= 0.10, rhyme.full_over_histospec >= 1.01",
    parts={part: part for part in ("orders", "replay", "rhyme")},
    sizes={"part_of_requests": (1, 40), "queues": ("shallow,even,deep", "even"), "orders": ("", "history,oracle")},
)
BENCHMARK.run_as(__name__)

from benchmarks import rollout_workloads as workloads
from benchmarks.rollout_workloads import PROMPT_TOKENS, STEP_S, STEPS_OF_EPOCH, WORKLOADS, Workload
from fusion.costmodel.pace import EngineCost, StepSums
from fusion.npu import DeviceConfig
from stalesync.job.config import Config
from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.draft_texts import measured
from stalesync.simulator.drafts import DraftSpec
from stalesync.simulator.lengths import DrawnLengths
from stalesync.simulator.run import SimulatedRun
from stalesync.simulator.setup import SimulationSetup
from stalesync.simulator.work import Bound, SimulatedWork

Result = TypeVar("Result")

RUNAWAYS = 0.01
"""Share of responses at the maximum, in the runs that have such"""


@dataclass(frozen=True)
class Mode:
    """How requests are scheduled. ``divided``: whether in chunks, with a KV pool; ``search``: of HistoPipe, for shares
    of the engines, with tail migration."""

    order: str = "fifo"
    divided: bool = True
    drafts: DraftSpec | None = None
    max_staleness: int = 0
    search: bool = True


OF_HISTORY, OF_BOTH = DraftSpec(siblings=False, history=True), DraftSpec(history=True)
REPLAYED = {
    "plain": Mode(divided=False),
    "divided": Mode(),
    "context": Mode("context"),
    "seer": Mode("context", drafts=DraftSpec()),
    "least_generated": Mode("least_generated"),
    "history": Mode("history"),
    "full": Mode("history", drafts=OF_BOTH),
    "oracle": Mode("oracle"),
}
ORDERS = {
    **{order: Mode(order) for order in ("oracle", "history", "least_generated", "context", "fifo")},
    "history, whole": Mode("history", divided=False),
    "fifo, whole": Mode(divided=False),
}
"""Without chunks: whole"""
RHYME = {
    "plain": Mode(divided=False),
    "histopipe": Mode("histopipe", divided=False, search=False, max_staleness=1),
    "two_tier": Mode("histopipe", max_staleness=1),
    "histospec": Mode("histopipe", drafts=OF_HISTORY, max_staleness=1),
    "stalesync": Mode("history", max_staleness=1),
    "full": Mode("history", drafts=OF_BOTH, max_staleness=1),
    "full_s2": Mode("history", drafts=OF_BOTH, max_staleness=2),
}
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


class Rollout(NamedTuple):
    """One iteration's rollout. ``tail_s``: in which at most a tenth of the requests is left; ``bound_s``: with perfect
    balance; ``tokens``: generated."""

    seconds: float
    tail_s: float
    bound_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def prepared(
    workload: Workload, mode: Mode, seed: int, *, steps: int, rows: int, runaways: float = 0.0
) -> tuple[SimulationSetup, DrawnLengths]:
    """Return what a mode simulates of a workload, and the lengths of its responses. ``rows``: of an epoch;
    ``runaways``: share of responses at the maximum."""
    config = Config()
    config.device = DeviceConfig("emulated", pace=workload.model, pace_tokens=1, pace_speed=1.0)
    config.cluster.npus, config.cluster.hardware = workload.gpus, "h800"
    config.data.prompts_per_step, config.algorithm.group_size = workload.prompts, workload.group_size
    config.data.rows, config.run.steps, config.run.seed = rows, steps, seed
    config.training.share_prefixes = "off"  # as the published systems
    config.stalesync.max_staleness = mode.max_staleness
    for layout in (config.parallel.infer, config.parallel.train):
        layout.tp, layout.ep = workload.infer.tp, workload.infer.ep
    rollout = config.rollout
    rollout.max_response_length, rollout.sampling.forced_median = workload.max_tokens, workload.median_tokens
    rollout.sampling.forced_spread = [*workload.spread, runaways]
    rollout.engine.max_batch_tokens = workloads.MAX_BATCH_TOKENS
    rollout.engine.max_seqs = workload.max_seqs // workload.infer.dp
    rollout.schedule.order = mode.order
    rollout.schedule.chunk_tokens = workloads.CHUNK_TOKENS if mode.divided else None
    rollout.kv_pool.suspended = "pool" if mode.divided else "recompute"
    setup = SimulationSetup.of(config, kv_tokens=workload.kv_tokens)
    pace = replace(setup.engine.cost.pace, hardware=workloads.hardware(workload))
    cost = PublishedEngineCost(pace, workload.infer, full_batch=rollout.engine.max_seqs)
    setup = replace(setup, engine=replace(setup.engine, cost=cost, drafts=mode.drafts))
    if (pipe := setup.admission.histopipe) is not None and not mode.search:
        pipe = replace(pipe, search=False, growth=inf)
        setup = replace(setup, admission=replace(setup.admission, histopipe=pipe))
    forced: Any = ForcedLengths.of(rollout, seed)
    return setup, DrawnLengths(forced, workload.group_size, PROMPT_TOKENS, rows)


def simulate(workload: Workload, mode: Mode, seed: int, runaways: float = 0.0, epoch: int = 2) -> Rollout:
    """Simulate one iteration. ``epoch``: of its rows; in the first, nothing is known of their lengths."""
    setup, lengths = prepared(workload, mode, seed, steps=1, rows=workload.prompts, runaways=runaways)
    first, run = lengths.next(workload.prompts), SimulatedRun(setup, lengths)
    if mode.order == "history" and epoch > 1:
        for row, prompt in enumerate(first):
            run.admission.buffer.history.observe(row, str(row), prompt.response_tokens)
        run.admission.buffer.history.end_step()
    run.admission.observe_kv_tokens(workload.kv_tokens * setup.engine.num_ranks)
    (step,) = run.run()
    work = SimulatedWork(0.0, step.work.contexts, step.work.prefilled, step.work.prefill_pairs)
    work.decodes = step.work.decodes
    steps_s = STEP_S * work.decodes / (workload.max_seqs * workload.engines)
    bound_s = Bound(setup)(work).generation / workload.gpus + steps_s
    return Rollout(step.generate_s, step.tail_s, bound_s, step.tokens - workload.requests * PROMPT_TOKENS)


def in_processes(simulate_case: Callable[[Any], Result], cases: Iterable[Any]) -> dict[Any, Result]:
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


def _simulate(case: tuple[str, str, int, float, int, int, str]) -> Rollout:
    """Simulate a rollout: workload, mode, seed, share of runaways, epoch, part of the requests, file of texts."""
    name, of, seed, runaways, epoch, part, texts = case
    mode = drafted({**ORDERS, **REPLAYED}[of], texts)
    return simulate({**WORKLOADS, **QUEUES}[name].fewer(part), mode, seed, runaways, epoch)


def drafted(mode: Mode, texts: str) -> Mode:
    """Return a mode whose drafts have the acceptance of recorded responses; "": the same."""
    return replace(mode, drafts=_drafts_of(mode.drafts, texts)) if texts and mode.drafts is not None else mode


@lru_cache
def _drafts_of(drafts: DraftSpec, texts: str) -> DraftSpec:
    return measured(Path(texts), siblings=drafts.siblings, history=drafts.history)


# ---- orders


def orders(args: Arguments) -> Figures:
    queues, seeds, part = args.queues.split(","), range(1, args.seeds + 1), args.part_of_requests
    names = [name for name in ORDERS if not args.orders or name in args.orders.split(",")]
    runs = in_processes(_simulate, product(queues, names, seeds, (0.0, RUNAWAYS), (1, 2), [part], [""]))
    figures: Figures = {}
    for queue, runaways, epoch in product(queues, (0.0, RUNAWAYS), (1, 2)):
        by_mode = figures[f"{queue}, {runaways:.0%} runaways, epoch {epoch}"] = {}
        for mode in names:
            pairs = [[runs[queue, one, seed, runaways, epoch, part, ""] for one in (mode, "oracle")] for seed in seeds]
            ratios = [own.tokens_per_s / most.tokens_per_s for own, most in pairs]
            by_mode[mode] = {"ratio_to_oracle": mean(ratios), "lowest": min(ratios)}
    return figures


# ---- replay


def replay(args: Arguments) -> Figures:
    names, seeds, part, texts = args.workloads.split(","), range(1, args.seeds + 1), args.part_of_requests, args.texts
    modes = [(mode, 0.0, "") for mode in REPLAYED] + [(mode, RUNAWAYS, "") for mode in ("plain", "full")]
    modes += [(mode, 0.0, texts) for mode in ("seer", "full") if texts]
    cases = [(name, mode, seed, *how, 2, part, text) for name in names for mode, *how, text in modes for seed in seeds]
    results, figures = in_processes(_simulate, cases), Figures()
    for name in names:
        published, ratio = WORKLOADS[name].published, WORKLOADS[name].ratio

        def rollouts(mode: str, runaways: float = 0.0, texts: str = "", name: str = name) -> list[Rollout]:
            return [results[name, mode, seed, runaways, 2, part, texts] for seed in seeds]

        plain = rollouts("plain")
        by_mode: Figures = {mode: replayed(plain, rollouts(mode), ratio.get(mode)) for mode in REPLAYED}
        by_mode["full_with_runaways"] = replayed(rollouts("plain", RUNAWAYS), rollouts("full", RUNAWAYS))
        for mode in ("seer", "full") if texts else ():
            by_mode[f"{mode}, texts"] = replayed(plain, rollouts(mode, texts=texts), ratio.get(mode))
        tail_share = mean(one.tail_s / one.seconds for one in plain)
        by_mode["plain"] |= {
            "abs_deviation_s": abs(by_mode["plain"]["seconds"] / published["plain_s"] - 1),
            "abs_deviation_tail_share": abs(tail_share / (published["plain_tail_s"] / published["plain_s"]) - 1),
        }
        by_mode["published"] = published | {"seer_tail_cut": 1 - published["seer_tail_s"] / published["plain_tail_s"]}
        by_mode["full_over_seer"] = by_mode["full"]["ratio"] / by_mode["seer"]["ratio"]
        by_mode["perfect_balance"] = mean(one.seconds / one.bound_s for one in plain)
        figures[name] = by_mode
        progress(f"{name}, full", by_mode["full"])
    return figures


def replayed(plain: Sequence[Rollout], rollouts: Sequence[Rollout], published: float | None = None) -> Figures:
    """Return a mode's figures, with its ratio to `plain`."""
    figures = compared([1 / one.seconds for one in plain], [1 / one.seconds for one in rollouts], published)
    return figures | {
        "tail_cut": mean(1 - other.tail_s / one.tail_s for one, other in zip(plain, rollouts, strict=True)),
        "seconds": mean(one.seconds for one in rollouts),
        "tail_s": mean(one.tail_s for one in rollouts),
    }


# ---- rhyme


def _simulate_rhyme(case: tuple[str, int, int, int, str]) -> float:
    """Simulate two epochs of a mode; return the tokens a second of the second one."""
    name, seed, part, max_tokens, texts = case
    mode, workload = drafted(RHYME[name], texts), WORKLOADS["rhyme"].fewer(part)
    workload = replace(workload, max_tokens=max_tokens or workload.max_tokens)
    rows = workload.prompts * STEPS_OF_EPOCH
    # Two steps more than are measured: a run does not admit what it has no step left to train.
    setup, lengths = prepared(workload, mode, seed, steps=2 * STEPS_OF_EPOCH + 2, rows=rows)
    steps = SimulatedRun(setup, lengths).run()[STEPS_OF_EPOCH : 2 * STEPS_OF_EPOCH]
    assert all(lag <= mode.max_staleness for step in steps for lag in step.lags)
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def rhyme(args: Arguments) -> Figures:
    seeds, size = range(args.first_seed, args.first_seed + args.seeds), (args.part_of_requests, args.max_tokens)
    published = {} if args.max_tokens else WORKLOADS["rhyme"].ratio
    modes = [(name, "") for name in RHYME]
    modes += [(name, args.texts) for name, mode in RHYME.items() if args.texts and mode.drafts is not None]
    speed = in_processes(_simulate_rhyme, [(mode, seed, *size, texts) for mode, texts in modes for seed in seeds])
    figures: Figures = {}
    for name, texts in modes:
        own = [speed[(name, seed, *size, texts)] for seed in seeds]
        plain, mode = [speed[("plain", seed, *size, "")] for seed in seeds], f"{name}, texts" if texts else name
        figures[mode] = progress(mode, compared(plain, own, published.get(name)) | {"tokens_per_s": mean(own)})
    return figures | {"full_over_histospec": figures["full"]["ratio"] / figures["histospec"]["ratio"]}
