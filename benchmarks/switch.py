"""Measure switching weights between two layouts on the same cards, against the wire's floor and Megatron-Core.

    python benchmarks/switch.py --json switch.json [--rounds 7] [--pairs TP2PP2->EP4 …]

A Qwen3-MoE of 89M parameters (fp32) on four emulated NPUs, one process and one thread each; slices that are equal in
both layouts share storage. For every pair, in both directions:

    moved     bytes sent between ranks, summed over all ranks
    floor     the fastest exchange of the pair's byte matrix, plus one memcpy of the bytes that must be packed and of
              those that stay on their rank but change storage (switch_floor.py)
    switch    `Switcher.run`, from weights in one layout to weights in the other, verified element by element
    megatron  `megatron.core.resharding`, cached, same tensors and layouts (switch_megatron.py), where it is importable
    extra     bytes at the peak beyond max(A, B) on the worst rank, allocated and reserved; bucket = 1/16 of the largest
              shard. Megatron's extra is what it allocates beyond its two models, which must both be resident

Times are from the first rank's start to the last rank's end. All sides run in every round; figures are medians, the
first round warms up, no round is discarded. Every pair runs in fresh processes: the process groups and memory that
Megatron leaves slow down both sides alike. At the bound: the switch with max(A, B) + 4 buckets as the card's capacity,
and two mutants of its plan, one that frees nothing and one in layer order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from benchmarks import switch_megatron  # noqa: E402
from benchmarks.switch_clock import worst  # noqa: E402
from benchmarks.switch_floor import Floor, byte_matrix  # noqa: E402
from benchmarks.switch_pair import Extra, Pair  # noqa: E402
from fusion.model import ModelConfig, Parallel, global_params  # noqa: E402
from fusion.npu import Device, open_device  # noqa: E402
from tests.ep_switch.mutants import frees_nothing, in_layer_order  # noqa: E402

SHAPE = dict(
    model_type="qwen3_moe",
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=336,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    max_position_embeddings=1024,
)
WORLD = 4
CAPACITY_BYTES = 4 << 30
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

    missing = switch_megatron.why_not()
    if missing:
        print(f"Megatron-Core is not measured: {missing} (pip install --no-deps -r requirements/megatron.txt).")
    result: dict[str, Any] = {}
    for number, (one, other) in enumerate(PAIRS):
        if args.pairs and not set(args.pairs) & set(names(one, other)):
            continue
        print(f"{' and '.join(names(one, other))} …", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, (folder, args.rounds, number), WORLD)
            measured = json.loads(Path(folder, "result.json").read_text())
        result = measured | {"figures": result.get("figures", {}) | measured["figures"]}
    print_table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def names(one: tuple[str, Parallel], other: tuple[str, Parallel]) -> tuple[str, str]:
    """Name both directions of a pair."""
    return f"{one[0]}->{other[0]}", f"{other[0]}->{one[0]}"


def rank_main(rank: int, folder: str, rounds: int, number: int) -> None:
    torch.set_num_threads(1)
    device = open_device("emulated", index=rank, capacity_bytes=CAPACITY_BYTES)
    dist.init_process_group(
        device.process_group_backend, init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    config, (one, other), description = ModelConfig.from_hf(SHAPE), PAIRS[number], device.describe()
    measured = measure(config, device, layouts=(one[1], other[1]), rounds=rounds)
    if rank == 0:
        result = {
            "device": description,
            "rounds": rounds,
            "torch": torch.__version__,
            "parameters": sum(torch.Size(shape).numel() for shape in global_params(config).values()),
            "model": SHAPE,
            "figures": dict(zip(names(one, other), measured, strict=True)),
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def measure(
    config: ModelConfig, device: Device, *, layouts: tuple[Parallel, Parallel], rounds: int
) -> list[dict[str, Any]]:
    """Return the figures of both directions, the same on every rank."""
    one, other = layouts
    pair = Pair(config, device, one=one, other=other)
    memory = measure_memory(pair)
    floors = [Floor(device, byte_matrix(plan)) for plan in pair.plans]
    refit = switch_megatron.Refit(config, device, one=one, other=other) if switch_megatron.why_not() is None else None
    switches: list[list[float]] = [[], []]
    refits: list[list[tuple[float, int]]] = [[], []]
    for round_ in range(-1, rounds):
        for source in (0, 1):
            seconds, _ = pair.switch(source)
            floors[source].measure(keep=round_ >= 0)
            timed_refit = refit.time(source, verify=round_ < 0) if refit else None
            if round_ >= 0:
                switches[source].append(seconds)
                refits[source] += [timed_refit] if timed_refit else []
    pair.verify(0)
    return [times(floors[i], switches[i], refits[i]) | memory[i] for i in (0, 1)]


def measure_memory(pair: Pair) -> list[dict[str, Any]]:
    """Measure the peak memory of switches, alone on the cards and from an empty cache, and which variants of the plan
    fit the bound. One switch of each direction is verified. Starts and ends with the first end resident."""
    extras: list[list[Extra]] = [[], []]
    for repetition in range(3):
        for source in (0, 1):
            pair.device.empty_cache()
            extras[source].append(pair.switch(source)[1])
            if repetition == 0:
                pair.verify(1 - source)
    figures = []
    for source in (0, 1):
        entry: dict[str, Any] = {
            "peak_extra_bytes": max(extra.allocated for extra in extras[source]),
            "peak_extra_reserved_bytes": max(extra.reserved for extra in extras[source]),
            "bucket_bytes": pair.bucket_bytes,
        }
        for name, change in (("plan", None), ("frees_nothing", frees_nothing), ("layer_order", in_layer_order)):
            pair.refill(source)
            entry[f"{name}_fits_bound"] = pair.fits_the_bound(source, change(pair.plans[source]) if change else None)
        figures.append(entry)
    pair.refill(0)
    return figures


def times(floor: Floor, switches_s: list[float], refits: list[tuple[float, int]]) -> dict[str, Any]:
    wires_s = {name: statistics.median(seconds) for name, seconds in floor.seconds.items()}
    memcpy_s, local_s = wires_s.pop("memcpy"), wires_s.pop("local")
    wire = min(wires_s, key=lambda name: wires_s[name])
    floor_s, switch_s = wires_s[wire] + memcpy_s + local_s, statistics.median(switches_s)
    return {
        "bytes_moved": floor.moved,
        "packed_bytes": worst(floor.packed),
        "floor_s": floor_s,
        "floor_wire": wire,
        "wire_s": wires_s,
        "memcpy_s": memcpy_s,
        "local_s": local_s,
        "switch_s": switch_s,
        "switch_s_min_max": [min(switches_s), max(switches_s)],
        "ratio_to_floor": switch_s / floor_s,
        "megatron_refit_s": statistics.median(seconds for seconds, _ in refits) if refits else None,
        "megatron_peak_extra_bytes": max(peak for _, peak in refits) if refits else None,
    }


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
