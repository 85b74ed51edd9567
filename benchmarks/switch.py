"""Measure switching weights between two layouts on the same cards, against the wire's floor and Megatron-Core.

    python benchmarks/switch.py --json switch.json [--rounds 7] [--pairs TP2PP2->EP4 …]

A Qwen3-MoE of 89M parameters (fp32) on four emulated NPUs, one process and one thread each; slices that are equal in
both layouts share storage. For every pair, in both directions:

    moved     bytes sent between ranks, summed over all ranks
    floor     the fastest exchange of the pair's byte matrix, with one memcpy of the bytes that must be packed for it,
              and one of those that stay on their rank but change storage (switch_floor.py)
    switch    `Switcher.run`, from weights in one layout to weights in the other, verified element by element
    megatron  `megatron.core.resharding`, cached, same tensors and layouts (switch_megatron.py), where it is importable
    extra     bytes at the peak beyond max(A, B) on the worst rank, allocated and reserved; bucket = 1/16 of the largest
              shard. Megatron's extra is what it allocates beyond its two models, which must both be resident

Times are from the first rank's start to the last rank's end. All sides run in every round, in rotating order; figures
are medians, the first round warms up, no other is discarded. Every pair runs in fresh processes: the process groups and
memory that Megatron leaves slow down both sides alike. At the bound: the switch with max(A, B) + 4 buckets as the
card's capacity, and two mutants of its plan, one that frees nothing and one in layer order.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fusion.model import Parallel  # noqa: E402

TARGETS = {"ratio": 1.5, "buckets": 4.0, "megatron_time": 0.5, "megatron_memory": 0.25}

EP4 = ("EP4", Parallel(4, ep=4))
PAIRS = [
    (("TP2EP2", Parallel(4, tp=2, ep=2)), ("TP1EP4", Parallel(4, ep=4))),
    (("TP2PP2", Parallel(4, tp=2, pp=2)), EP4),
    (EP4, ("TP4", Parallel(4, tp=4))),
    (("TP2ETP2EP2", Parallel(4, tp=2, ep=2, etp=2)), EP4),
    (("TP2PP2ETP2", Parallel(4, tp=2, pp=2, etp=2)), EP4),
    (EP4, ("TP4ETP4", Parallel(4, tp=4, etp=4))),
    (("PP4", Parallel(4, pp=4)), EP4),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", nargs="*", help="measure only these, named in either direction; default: all")
    args = parser.parse_args()
    known = {name for one, other in PAIRS for name in names(one, other)}
    if unknown := set(args.pairs or ()) - known:
        parser.error(f"unknown pairs {sorted(unknown)}: expected some of {sorted(known)}")

    from benchmarks.switch_megatron import why_not  # only now: --help must not wait for torch
    from benchmarks.switch_ranks import run

    if missing := why_not():
        print(f"Megatron-Core is not measured: {missing} (pip install -r requirements/megatron.txt).")
    result: dict[str, Any] = {}
    for one, other in PAIRS:
        if args.pairs and not set(args.pairs) & set(names(one, other)):
            continue
        print(f"{' and '.join(names(one, other))} …", file=sys.stderr)
        measured = run((one[1], other[1]), args.rounds)
        figures = dict(zip(names(one, other), measured["figures"], strict=True))
        result = measured | {"figures": result.get("figures", {}) | figures}
    print_table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def names(one: tuple[str, Parallel], other: tuple[str, Parallel]) -> tuple[str, str]:
    """Name both directions of a pair."""
    return f"{one[0]}->{other[0]}", f"{other[0]}->{one[0]}"


def print_table(result: dict[str, Any]) -> None:
    print(f"{result['device']}, {result['parameters'] / 1e6:.0f}M parameters, median of {result['rounds']} rounds")
    print(f"{'':20}{'moved':>8}{'floor':>9}{'switch':>9}{'ratio':>7}{'megatron':>10}{'ours/its':>9}", end="")
    print(f"{'extra: buckets':>16}{'reserved':>9}{'of megatron':>12}  at the bound")
    mib = 1 << 20
    for name, f in result["figures"].items():
        peer, bucket = f["megatron_refit_s"], f["bucket_bytes"]
        print(
            f"{name:20}{f['bytes_moved'] / mib:5.0f}MiB{f['floor_s'] * 1e3:7.0f}ms{f['switch_s'] * 1e3:7.0f}ms", end=""
        )
        print(f"{f['ratio_to_floor']:7.2f}", end="")
        print(f"{peer * 1e3:8.0f}ms{f['switch_s'] / peer:9.2f}" if peer else f"{'-':>10}{'-':>9}", end="")
        print(f"{f['peak_extra_bytes'] / bucket:16.2f}{f['peak_extra_reserved_bytes'] / bucket:9.2f}", end="")
        print(f"{f['peak_extra_bytes'] / f['megatron_peak_extra_bytes']:12.2f}" if peer else f"{'-':>12}", end="")
        print(f"  {verdict(f)}")
    print("targets".ljust(20) + f"{TARGETS['ratio']:33.2f}{TARGETS['megatron_time']:19.2f}", end="")
    print(f"{TARGETS['buckets']:16.2f}{TARGETS['buckets']:9.2f}{TARGETS['megatron_memory']:12.2f}")


def verdict(f: dict[str, Any]) -> str:
    words = {True: "fits", False: "out of memory"}
    return (
        f"{words[f['plan_fits_bound']]}; frees nothing: {words[f['frees_nothing_fits_bound']]}; "
        f"layer order: {words[f['layer_order_fits_bound']]}"
    )


if __name__ == "__main__":
    main()
