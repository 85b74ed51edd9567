"""Measure what the overlap of switch, offload and compute hides, on emulated cards whose copies take time.

Two emulated NPUs with `device.streams=timed`: copies to and from the host and collectives last as long as their bytes
take at configured rates, beside what the card computes; here so that each takes about 0.4 s. The optimizer's states
leave while the weights switch to the engine's layout by collectives, and return while the card computes matrix
products, as between the phases of a step. Seconds, alone and together, are the minimum of rounds in which all ran in
turn. hidden_share: (seconds of both alone - together) / seconds of the shorter one, 1 where it is hidden, 0 where
nothing overlaps; of both pairs, all seconds hidden over all that could be.
"""

from collections.abc import Callable

from benchmarks.harness import Arguments, Benchmark, Figures, Option, in_turns, timed

BENCHMARK = Benchmark(
    __doc__,
    [Option("rounds", 5, smoke=1, help="rounds that are measured")],
    "overlap.hidden_share >= 0.8",
    sizes={"seconds": (0.4, 0.05), "mib": (16, 1)},
)
BENCHMARK.run_as(__name__)

import torch

from benchmarks.models import on_cards
from benchmarks.offload import states_of
from fusion.model import Parallel
from fusion.npu import Device, open_device
from fusion.offload import Offloader
from tests.ep_switch.pair import Pair, wall
from tests.helpers import tiny_config

WORLD = 2
CONFIG = tiny_config(num_hidden_layers=4, hidden_size=256, moe_intermediate_size=256, num_experts=8)
PAIRS = {"switch": ("offload", "switch"), "training": ("onload", "products")}
"""Pairs that run beside each other in a step"""


def measure(args: Arguments) -> Figures:
    return {"overlap": on_cards(measure_rank, WORLD, args.mib << 20, args.seconds, args.rounds)[0]}


def measure_rank(rank: int, _: Device, nbytes: int, seconds: float, rounds: int) -> Figures:
    """Return the figures, the same on every rank. Collective."""
    grids, index = (Parallel(WORLD, tp=2, etp=2), Parallel(WORLD, ep=2)), WORLD + rank
    plan = Pair(CONFIG, open_device("emulated", index=index), one=grids[0], other=grids[1]).plans[0]
    rates = nbytes / seconds, sum(plan.received_bytes(rank).values()) / seconds
    device = open_device("emulated", index=index + WORLD, capacity_bytes=1 << 30, streams="timed", rates=rates)
    pair, offloader = Pair(CONFIG, device, one=grids[0], other=grids[1]), Offloader(device)
    states, count = states_of(device, nbytes // 24, 2), 20
    x_DD = torch.ones(256, 256, device=device.torch_device)

    def products() -> None:
        for _ in range(count):
            torch.mm(x_DD, x_DD)

    def out() -> None:
        offloader.out(states)

    def together(*starts: Callable[[], object]) -> float:
        return wall(device, lambda: [start() for start in (*starts, offloader.wait)])

    def round_of(_: int) -> dict[str, float]:
        switch, back = (switcher.run for switcher in pair.switchers)
        times = {"offload": together(out), "onload": together(offloader.back), "switch": together(switch)}
        back()
        times |= {"products": together(products), "offload+switch": together(out, switch)}
        back()
        return times | {"onload+products": together(offloader.back, products)}

    count = max(1, round(count * seconds / timed(products)))
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
