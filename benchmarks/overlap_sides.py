"""Run the sides of `benchmarks/overlap.py` on its ranks: copies, switch and products, alone and together."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable

import torch

from benchmarks.harness import Figures, in_turns
from benchmarks.offload_sides import states_of
from fusion.model import Parallel
from fusion.npu import Device, open_device
from fusion.offload import Offloader
from tests.ep_switch.pair import Pair, wall
from tests.helpers import end_ranks, run_ranks, tiny_config

WORLD, TIMEOUT_S = 2, 1800
CONFIG = tiny_config(num_hidden_layers=4, hidden_size=256, moe_intermediate_size=256, num_experts=8)
PAIRS = {"switch": ("offload", "switch"), "training": ("onload", "products")}
"""Pairs that run beside each other in a step"""


def measure(args: Namespace) -> Figures:
    """Measure every side on two cards."""
    figures, _ = run_ranks(measure_rank, WORLD, args.mib << 20, args.seconds, args.rounds, timeout_s=TIMEOUT_S)
    end_ranks()
    return {"overlap": figures}


def measure_rank(rank: int, _: Device, nbytes: int, seconds: float, rounds: int) -> Figures:
    """Return the figures, the same on every rank. Collective."""
    grids, index = (Parallel(WORLD, tp=2, etp=2), Parallel(WORLD, ep=2)), WORLD + rank
    plan = Pair(CONFIG, open_device("emulated", index=index), one=grids[0], other=grids[1]).plans[0]
    rates = nbytes / seconds, sum(plan.received_bytes(rank).values()) / seconds
    device = open_device("emulated", index=index + WORLD, capacity_bytes=1 << 30, streams="timed", rates=rates)
    pair, offloader = Pair(CONFIG, device, one=grids[0], other=grids[1]), Offloader(device)
    states = states_of(device, nbytes // 24, 2)
    x_DD = torch.ones(256, 256, device=device.torch_device)

    def products() -> None:
        for _ in range(count):
            torch.mm(x_DD, x_DD)

    def out() -> None:
        offloader.out(states)

    def together(*starts: Callable[[], object]) -> float:
        def work() -> None:
            for start in starts:
                start()
            offloader.wait()

        return wall(device, work)

    def switch() -> None:
        pair.switchers[0].run()

    def round_of(_: int) -> dict[str, float]:
        times = {"offload": together(out), "onload": together(offloader.back)}
        times["switch"] = together(switch)
        pair.switchers[1].run()
        times["products"] = together(products)
        times["offload+switch"] = together(out, switch)
        pair.switchers[1].run()
        times["onload+products"] = together(offloader.back, products)
        return times

    count = 20
    start = time.perf_counter()
    products()
    count = max(1, round(count * seconds / (time.perf_counter() - start)))
    by_round = in_turns({"": round_of}, rounds)[""]
    least = {name: min(times[name] for times in by_round) for name in by_round[0]}
    figures: Figures = {}
    hidden = hideable = 0.0
    for name, (one, other) in PAIRS.items():
        both, shorter = least[f"{one}+{other}"], min(least[one], least[other])
        saved = least[one] + least[other] - both
        hidden, hideable = hidden + saved, hideable + shorter
        figures[name] = {f"{one}_s": least[one], f"{other}_s": least[other], "both_s": both}
        figures[name]["hidden_share"] = saved / shorter
    return figures | {"hidden_share": hidden / hideable}
