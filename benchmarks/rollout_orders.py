"""Run the part `orders` of `benchmarks/rollout.py`: every order in virtual time, with and without runaways.

    workload   requests            engines          sequences that an engine decodes   queue
    shallow    64 x 8, OLMoE-7B    4 of two dies    16 (8 a rank)                      8 requests a sequence
    even       the same            the same         64                                 2
    deep       600 x 16, 72B       16 of 8 dies     256                                2.3, responses 20 times as long

Runaways: a hundredth of the responses at the maximum, 5 to 8 times the mean, which nothing foretells. Figures are
tokens per second relative to `oracle` with chunks, which knows every length; mean and lowest of the seeds.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import mean
from typing import Any

from benchmarks.rollout_replay import RUNAWAYS, Mode, simulate
from benchmarks.rollout_workloads import WORKLOADS, Workload
from fusion.model import Parallel

SHALLOW = Workload(
    model="olmoe_7b",
    gpus=8,
    infer=Parallel(2, ep=2),
    requests=512,
    group_size=8,
    max_tokens=12288,
    mean_tokens=1600,
    max_seqs=16,
    spread=(0.95, 0.25),
)
QUEUES = {"shallow": SHALLOW, "even": Workload(**vars(SHALLOW) | {"max_seqs": 64}), "deep": WORKLOADS["qwen2_vl_72b"]}

MODES = {
    "oracle": Mode("oracle"),
    "history": Mode("history"),
    "least_generated": Mode("least_generated"),
    "context": Mode("context"),
    "fifo": Mode(),
    "history, whole": Mode("history", divided=False),
    "fifo, whole": Mode(divided=False),
}
"""Without chunks: whole"""

TARGET = 0.92
"""Lower bound of the default order, relative to `oracle`"""

Case = tuple[str, str, int, float, int]


def orders(args: argparse.Namespace) -> dict[str, Any]:
    """Simulates every order, in the first and in the second epoch of the rows."""
    seeds = range(1, args.seeds + 1)
    cases: list[Case] = list(product(QUEUES, MODES, seeds, (0.0, RUNAWAYS), (1, 2)))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        speed = dict(zip(cases, pool.map(_tokens_per_s, cases), strict=True))
    figures: dict[str, Any] = {}
    for queue, runaways, epoch in product(QUEUES, (0.0, RUNAWAYS), (1, 2)):
        name = f"{queue}, {runaways:.0%} runaways, epoch {epoch}"
        figures[name] = {}
        for mode in MODES:
            ratios = [speed[queue, mode, seed, runaways, epoch] for seed in seeds]
            best = [speed[queue, "oracle", seed, runaways, epoch] for seed in seeds]
            ratios = [one / most for one, most in zip(ratios, best, strict=True)]
            figures[name][mode] = {"ratio_to_oracle": mean(ratios), "lowest": min(ratios)}
        shown = "; ".join(f"{mode} {one['ratio_to_oracle']:.3f}" for mode, one in figures[name].items())
        print(f"orders, {name}: {shown}", flush=True)
    return figures


def misses(figures: dict[str, Any], order: str) -> list[str]:
    """Returns a line for each workload on which an order with chunks misses the target."""
    return [
        f"{name}: {order} reaches {modes[order]['ratio_to_oracle']:.3f} of oracle, target {TARGET}"
        for name, modes in figures.items()
        if modes[order]["ratio_to_oracle"] < TARGET
    ]


def _tokens_per_s(case: Case) -> float:
    queue, mode, seed, runaways, epoch = case
    rollout = simulate(QUEUES[queue], MODES[mode], seed, runaways, epoch=epoch)
    return rollout.tokens / rollout.seconds
