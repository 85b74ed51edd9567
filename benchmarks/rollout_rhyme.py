"""Run the part `rhyme` of `benchmarks/rollout.py`: RhymeRL's ablation in virtual time."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from statistics import mean

from benchmarks.harness import Figures, progress
from benchmarks.rollout_virtual import PublishedEngineCost, compared, config_of, drafts_of, forced_lengths, in_processes
from benchmarks.rollout_workloads import HARDWARE, PROMPT_TOKENS, STEPS_OF_EPOCH, WORKLOADS
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


def simulate(case: tuple[str, int, int, str]) -> float:
    """Simulate two epochs of a mode; return the tokens a second of the second one."""
    name, seed, part, texts = case
    mode, workload = MODES[name], WORKLOADS["rhyme"].fewer(part)
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


def measure(args: Namespace) -> Figures:
    """Simulate every mode, beside what is published."""
    seeds, part = range(args.first_seed, args.first_seed + args.seeds), args.part_of_requests
    drafted = [mode for mode in MODES if args.texts and MODES[mode].drafts is not None]
    modes = [*product(MODES, [""]), *product(drafted, [args.texts])]
    speed = in_processes(simulate, [(mode, seed, part, texts) for mode, texts in modes for seed in seeds])
    figures: Figures = {}
    for name, texts in modes:
        own = [speed[name, seed, part, texts] for seed in seeds]
        plain, mode = [speed["plain", seed, part, ""] for seed in seeds], f"{name}, texts" if texts else name
        figures[mode] = compared(plain, own, WORKLOADS["rhyme"].ratio.get(name)) | {"tokens_per_s": mean(own)}
        progress(mode, figures[mode])
    return figures | {"full_over_histospec": figures["full"]["ratio"] / figures["histospec"]["ratio"]}
