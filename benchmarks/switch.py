"""Measure switching weights between two layouts on the same cards, against the wire's floor and Megatron-Core.

    python benchmarks/switch.py --json switch.json [--rounds 7] [--pairs "TP2PP2->EP4,megatron TP2EP2->vllm EP4"]

A Qwen3-MoE of 89M parameters (fp32) on four emulated NPUs, one process and one thread each; slices that are equal in
both layouts share storage. The weights of Megatron-Core and of vLLM are stored as these programs store them (neither is
needed). For every pair, in both directions:

    moved     bytes sent between ranks, summed over all ranks
    floor     the fastest exchange of the pair's byte matrix, with one memcpy of the bytes that must be packed for it,
              and one of those that stay on their rank but change storage (`switch_sides.py`)
    switch    `Switcher.run`, from weights in one layout to weights in the other, verified element by element
    megatron  `megatron.core.resharding`, cached, same tensors and layouts, if importable
    extra     bytes at the peak beyond max(A, B) on the worst rank, in buckets (1/16 of the largest shard), allocated
              and reserved; for weights of Megatron-Core and vLLM beyond max(A, B) + the largest tensor that they leave
              whole. Megatron's is what it allocates beyond its two models, which must both be resident
    fits      whether a card whose capacity is max(A, B) + 4 buckets suffices: to the switch, and to two mutants of its
              plan, one that frees nothing and one in layer order

Times are from the first rank's start to the last rank's end. All sides run in every round, in rotating order; figures
are medians, the first round warms up. Every pair runs in fresh processes: the process groups and memory that Megatron
leaves slow down both sides alike.
"""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402
from fusion.model import Parallel  # noqa: E402
from fusion.model.formats import EMBEDDED, MEGATRON, VLLM_CPU, Format  # noqa: E402

LAYOUTS = {
    "EP4": Parallel(4, ep=4),
    "TP2EP2": Parallel(4, tp=2, ep=2),
    "TP2PP2": Parallel(4, tp=2, pp=2),
    "TP4": Parallel(4, tp=4),
    "TP2ETP2EP2": Parallel(4, tp=2, ep=2, etp=2),
    "TP2PP2ETP2": Parallel(4, tp=2, pp=2, etp=2),
    "TP4ETP4": Parallel(4, tp=4, etp=4),
    "PP4": Parallel(4, pp=4),
}
PAIRS = {f"{one}->EP4": (one, "EP4") for one in LAYOUTS if one != "EP4"}
PAIRS |= {f"{one}->vllm EP4": (one, "vllm EP4") for one in ("TP2EP2", "TP2PP2", "megatron TP2EP2")}
FORMATS: dict[str, Format] = {"": EMBEDDED, "megatron": MEGATRON, "vllm": VLLM_CPU}


def end(name: str) -> tuple[Parallel, Format]:
    """Return the grid and the format of an end such as `EP4` or `vllm EP4`."""
    program, _, layout = name.rpartition(" ")
    return LAYOUTS[layout], FORMATS[program]


def check(args: Namespace) -> str:
    unknown = {*args.pairs.split(",")} - PAIRS.keys() if args.pairs else ()
    return f"unknown pairs {sorted(unknown)}: expected some of {sorted(PAIRS)}" if unknown else ""


BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.switch_sides:measure"},
    [
        Option("rounds", 7, smoke=1, help="rounds that are measured"),
        Option("pairs", None, smoke="TP2PP2->EP4", help="measure only these, separated by commas; both directions"),
        Option("layers", 8, smoke=2),
        Option("hidden", 512, smoke=64),
    ],
    {
        "*.ratio_to_floor": "<= 1.5",
        "*.extra_buckets": "<= 4",
        "*.extra_buckets_reserved": "<= 4",
        "*.over_megatron": "<= 0.5",
        "*.extra_of_megatron": "<= 0.25",
    },
    check=check,
)

if __name__ == "__main__":
    BENCHMARK.main()
