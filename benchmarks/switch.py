"""Measure switching weights between two layouts on the same cards, against the wire's floor and Megatron-Core.

A Qwen3-MoE of 89M parameters (fp32) on four emulated NPUs, one process and one thread each; slices that are equal in
both layouts share storage. The weights of Megatron-Core and of vLLM are stored as these programs store them (neither is
needed). For every pair, in both directions:

    moved     bytes sent between ranks, summed over all ranks
    floor     min(shared, min(all_to_all, p2p) + memcpy) + local: the pair's byte matrix in one contiguous exchange
              between warm buffers, by `all_to_all_single`, by a batch of sends and receives, or from the sender's
              memory (shared, unpacked); memcpy of the bytes that must be packed for the first two, and of those that
              stay on their rank but change storage (local)
    switch    `Switcher.run`, from weights in one layout to weights in the other, verified element by element
    megatron  `megatron.core.resharding`, cached, same tensors and layouts, if importable
    extra     bytes at the peak beyond max(A, B) on the worst rank, in buckets (1/16 of the largest shard), allocated
              and reserved; for weights of Megatron-Core and vLLM beyond max(A, B) + the largest tensor that they leave
              whole. Megatron's is what it allocates beyond its two models, which must both be resident
    fits      whether a card whose capacity is max(A, B) + 4 buckets (and that tensor) suffices: to the switch, and to
              two mutants of its plan, one that frees nothing and one in layer order

Times are from the first rank's start to the last rank's end; figures are medians. Every pair runs in fresh processes:
the process groups and memory that Megatron leaves slow down both sides alike.
"""

import re
from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.harness import Arguments, Benchmark, Figures, Option, in_turns, medians_of, progress
from fusion.model import Parallel
from fusion.model.formats import EMBEDDED, MEGATRON, VLLM_CPU, Format

WORLD, LAYOUTS = 4, "EP4 TP2EP2 TP2PP2 TP4 TP2ETP2EP2 TP2PP2ETP2 TP4ETP4 PP4".split()
PAIRS = {f"{one}->EP4": (one, "EP4") for one in LAYOUTS if one != "EP4"}
PAIRS |= {f"{one}->vllm EP4": (one, "vllm EP4") for one in ("TP2EP2", "TP2PP2", "megatron TP2EP2")}
FORMATS: dict[str, Format] = {"": EMBEDDED, "megatron": MEGATRON, "vllm": VLLM_CPU}


def end(name: str) -> tuple[Parallel, Format]:
    """Return the grid and the format of an end such as `EP4` or `vllm EP4`."""
    program, _, layout = name.rpartition(" ")
    sizes = {axis.lower(): int(size) for axis, size in re.findall(r"([A-Z]+)(\d)", layout)}
    return Parallel(WORLD, **sizes), FORMATS[program]


def check(args: Arguments) -> str:
    unknown = {*args.pairs.split(",")} - PAIRS.keys() if args.pairs else ()
    return f"unknown pairs {sorted(unknown)}: expected some of {sorted(PAIRS)}" if unknown else ""


BENCHMARK = Benchmark(
    __doc__,
    [
        Option("rounds", 7, smoke=1, help="rounds that are measured"),
        Option("pairs", None, smoke="TP2PP2->EP4", help="measure only these, separated by commas; both directions"),
        Option("layers", 8, smoke=2, help="layers of the model"),
        Option("hidden", 512, smoke=64, help="its channels"),
    ],
    "*.ratio_to_floor <= 1.5, *.extra_buckets <= 4, *.extra_buckets_reserved <= 4, *.fits >= 1, "
    "*.over_megatron <= 0.5, *.extra_of_megatron <= 0.25",
    check=check,
)
BENCHMARK.run_as(__name__)

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.models import moe_of, on_cards
from fusion.ep_switch import Plan
from fusion.model import ModelConfig
from fusion.npu import Device
from fusion.npu.all_or_none import gather_bytes
from tests.ep_switch import megatron_peer
from tests.ep_switch.mutants import frees_nothing, in_layer_order
from tests.ep_switch.pair import Pair, wall


def measure(args: Arguments) -> Figures:
    if missing := megatron_peer.why_not():
        print(f"Megatron-Core is not measured: {missing} (pip install -r requirements/megatron.txt)")
    figures: Figures = {}
    for pair in args.pairs.split(",") if args.pairs else PAIRS:
        one, other = PAIRS[pair]
        both_ways, *_ = on_cards(measure_pair, WORLD, moe_of(args), (one, other), args.rounds)
        for name, ratios in zip((f"{one}->{other}", f"{other}->{one}"), both_ways, strict=True):
            figures[name] = progress(name, ratios)
    return figures


def measure_pair(rank: int, device: Device, config: ModelConfig, names: tuple[str, str], rounds: int) -> list[Figures]:
    """Return the figures of both directions, the same on every rank. Collective."""
    (one, first), (other, second) = map(end, names)
    pair = Pair(config, device, one=one, other=other, formats=(first, second))
    figures = [measure_memory(pair, source) for source in (0, 1)]
    pair.refill(0)
    floors = [Floor(device, byte_matrix(plan)) for plan in pair.plans]
    has_peer = first == second == EMBEDDED and megatron_peer.why_not() is None
    sides: Any = {
        "switch": lambda round: [pair.switch(source)[0] for source in (0, 1)],
        "floor": lambda round: [floor.measure() for floor in floors],
    }
    if has_peer:
        refit = megatron_peer.Refit(config, device, one=one, other=other)
        sides["megatron"] = lambda round: [refit.time(source, verify=round < 0) for source in (0, 1)]
    by_side = in_turns(sides, rounds)
    pair.verify(0)
    for source, row in enumerate(figures):
        switch_s = median(times[source] for times in by_side["switch"])
        wire, floor_s = floor_of(medians_of([one[source] for one in by_side["floor"]]))
        row |= {"moved_bytes": floors[source].moved, "switch_s": switch_s, "floor_s": floor_s, "wire": wire}
        row["ratio_to_floor"] = switch_s / floor_s
        if has_peer:
            refits = [one[source] for one in by_side["megatron"]]
            row["megatron_s"] = median(seconds for seconds, _ in refits)
            row["over_megatron"] = switch_s / row["megatron_s"]
            peak = max(peak for _, peak in refits)
            row["extra_of_megatron"] = row["extra_buckets"] * pair.bucket_bytes / peak
    return figures


def measure_memory(pair: Pair, source: int) -> Figures:
    """Measure the peak memory of switches from one end, alone on the cards and from an empty cache, and which variants
    of the plan fit the bound. The switch is verified."""
    extras = []
    for _ in range(3):
        pair.refill(source)
        pair.device.empty_cache()
        extras.append(pair.switch(source)[1])
    pair.verify(1 - source)
    fits: Figures = {
        "extra_buckets": max(extra.allocated for extra in extras) / pair.bucket_bytes,
        "extra_buckets_reserved": max(extra.reserved for extra in extras) / pair.bucket_bytes,
    }
    for name, change in (("fits", None), ("frees_nothing_fits", frees_nothing), ("layer_order_fits", in_layer_order)):
        pair.refill(source)
        fits[name] = pair.fits_the_bound(source, change(pair.plans[source]) if change else None)
    return fits


def floor_of(seconds: Mapping[str, float]) -> tuple[str, float]:
    """Return the fastest wire, including the packing that it requires, and the floor, from the seconds of each."""
    wires = {name: seconds[name] + seconds["memcpy"] for name in ("all_to_all", "p2p")} | {"shared": seconds["shared"]}
    wire = min(wires, key=lambda name: wires[name])
    return wire, wires[wire] + seconds["local"]


def byte_matrix(plan: Plan) -> np.ndarray:
    """Return bytes as [source rank, target rank], between layouts of one dtype; on the diagonal those copied within a
    rank."""
    matrix = np.zeros((max(plan.ranks) + 1,) * 2, np.int64)
    for round_ in plan.rounds:
        sender, receiver, numel, _ = round_.moves.ends.T
        np.add.at(matrix, (sender, receiver), numel * plan.wire_dtype.itemsize)
    return matrix


class Floor:
    """Holds the buffers of one direction of a pair and measures the exchanges between them."""

    def __init__(self, device: Device, matrix: np.ndarray):
        self.device, me = device, dist.get_rank()
        own, apart = int(matrix[me].sum()), matrix * (1 - np.eye(len(matrix), dtype=np.int64))
        self.sent, self.received = apart[me].tolist(), apart[:, me].tolist()
        self.moved, self.packed = int(apart.sum()), sum(self.sent)
        """Bytes sent between all ranks, and by this one"""
        with device.owner("buckets"):
            sizes = max(own, 1), max(sum(self.received), own, 1)
            self.send, self.receive = (
                torch.zeros(size, dtype=torch.uint8, device=device.torch_device) for size in sizes
            )
        handles = gather_bytes(device.share([self.send]), dist.group.WORLD)
        mapped = {peer: device.map(handles[peer], [None])[0] for peer, nbytes in enumerate(self.received) if nbytes}
        self.peers = []
        """This rank's bytes in every rank's send buffer, as views of it"""
        for peer, row in enumerate(apart):
            start = int(row[:me].sum())
            self.peers.append(mapped[peer][start : start + int(row[me])] if peer in mapped else self.send[:0])

    def measure(self) -> dict[str, float]:
        """Run every wire and copy once; return their seconds."""
        packed, source, target = self.packed, self.send, self.receive[: len(self.send)]
        received = self.receive[: sum(self.received)]
        ends = (dist.irecv, received.split(self.received)), (dist.isend, source[:packed].split(self.sent))

        def p2p() -> None:
            pieces = [(kind, piece, peer) for kind, pieces in ends for peer, piece in enumerate(pieces)]
            operations = [dist.P2POp(*one) for one in pieces if one[1].numel()]
            for request in dist.batch_isend_irecv(operations) if operations else ():
                request.wait()

        works = {
            "all_to_all": lambda: dist.all_to_all_single(received, source[:packed], self.received, self.sent),
            "p2p": p2p,
            "shared": lambda: [into.copy_(piece) for into, piece in zip(ends[0][1], self.peers, strict=True)],
            "memcpy": lambda: target[:packed].copy_(source[:packed]),
            "local": lambda: target[packed:].copy_(source[packed:]),
        }
        return {name: wall(self.device, work) for name, work in works.items()}
