"""Measure switching weights between two layouts on the same cards, against the wire's floor and Megatron-Core.

A Qwen3-MoE of 89M parameters (fp32) on four emulated NPUs, one process and one thread each; slices that are equal in
both layouts share storage. The weights of Megatron-Core and of vLLM are stored as these programs store them (neither is
needed). For every pair, in both directions:

    moved     bytes sent between ranks, summed over all ranks
    floor     min(shared, min(all_to_all, p2p) + memcpy) + local: the pair's byte matrix in one exchange, contiguous,
              between allocated and warm buffers, by one `all_to_all_single` with uneven splits, by one batch of sends
              and receives, or from the sender's memory (shared, unpacked); memcpy of the bytes that must be packed for
              the first two, and of those that stay on their rank but change storage (local). Not included: unpacking,
              allocating and freeing memory, and keeping order and bounds
    switch    `Switcher.run`, from weights in one layout to weights in the other, verified element by element
    megatron  `megatron.core.resharding`, cached, same tensors and layouts, if importable
    extra     bytes at the peak beyond max(A, B) on the worst rank, in buckets (1/16 of the largest shard), allocated
              and reserved; for weights of Megatron-Core and vLLM beyond max(A, B) + the largest tensor that they leave
              whole. Megatron's is what it allocates beyond its two models, which must both be resident
    fits      whether a card whose capacity is max(A, B) + 4 buckets (and that tensor) suffices: to the switch, and to
              two mutants of its plan, one that frees nothing and one in layer order. A card with room may reserve more:
              free memory between units, which the allocator gives back where it is needed

Times are from the first rank's start to the last rank's end. All sides run in every round, in rotating order; figures
are medians, the first round warms up. Every pair runs in fresh processes: the process groups and memory that Megatron
leaves slow down both sides alike.
"""

import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Figures, Option, in_turns, medians_of, progress
from fusion.model import Parallel
from fusion.model.formats import EMBEDDED, MEGATRON, VLLM_CPU, Format

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
    {"": "benchmarks.switch:measure"},
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

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())

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

WORLD = 4


def measure(args: Namespace) -> Figures:
    """Measure every pair in fresh processes, one per rank."""
    if missing := megatron_peer.why_not():
        print(f"Megatron-Core is not measured: {missing} (pip install -r requirements/megatron.txt)")
    figures: Figures = {}
    for pair in args.pairs.split(",") if args.pairs else PAIRS:
        one, other = PAIRS[pair]
        both_ways, *_ = on_cards(measure_pair, WORLD, moe_of(args), (one, other), args.rounds)
        for name, found in zip((f"{one}->{other}", f"{other}->{one}"), both_ways, strict=True):
            figures[name] = found
            progress(name, found)
    return figures


def measure_pair(rank: int, device: Device, config: ModelConfig, names: tuple[str, str], rounds: int) -> list[Figures]:
    """Return the figures of both directions, the same on every rank. Collective."""
    (one, first), (other, second) = map(end, names)
    pair = Pair(config, device, one=one, other=other, formats=(first, second))
    figures = [measure_memory(pair, source) for source in (0, 1)]
    pair.refill(0)
    floors = [Floor(device, byte_matrix(plan)) for plan in pair.plans]
    has_peer = first == second == EMBEDDED and megatron_peer.why_not() is None
    refit = megatron_peer.Refit(config, device, one=one, other=other) if has_peer else None

    def both(time: Any) -> Any:
        return lambda round: [time(source, round) for source in (0, 1)]

    sides = {
        "switch": both(lambda source, round: pair.switch(source)[0]),
        "floor": both(lambda source, round: floors[source].measure()),
    }
    if refit is not None:
        sides["megatron"] = both(lambda source, round: refit.time(source, verify=round < 0))
    by_side = in_turns(sides, rounds)
    pair.verify(0)
    for source, found in enumerate(figures):
        switch_s = statistics.median(times[source] for times in by_side["switch"])
        wire, floor_s = floor_of(medians_of([one[source] for one in by_side["floor"]]))
        found |= {"moved_bytes": floors[source].moved, "switch_s": switch_s, "floor_s": floor_s, "wire": wire}
        found["ratio_to_floor"] = switch_s / floor_s
        if refit is not None:
            refits = [one[source] for one in by_side["megatron"]]
            found["megatron_s"] = statistics.median(seconds for seconds, _ in refits)
            found["over_megatron"] = switch_s / found["megatron_s"]
            peak = max(peak for _, peak in refits)
            found["extra_of_megatron"] = found["extra_buckets"] * pair.bucket_bytes / peak
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
    found: Figures = {
        "extra_buckets": max(extra.allocated for extra in extras) / pair.bucket_bytes,
        "extra_buckets_reserved": max(extra.reserved for extra in extras) / pair.bucket_bytes,
    }
    for name, change in (("fits", None), ("frees_nothing_fits", frees_nothing), ("layer_order_fits", in_layer_order)):
        pair.refill(source)
        found[name] = pair.fits_the_bound(source, change(pair.plans[source]) if change else None)
    return found


def floor_of(seconds: Mapping[str, float]) -> tuple[str, float]:
    """Return the fastest wire, including the packing that it requires, and the floor, from the seconds of each."""
    wires = {name: seconds[name] + seconds["memcpy"] for name in ("all_to_all", "p2p")} | {"shared": seconds["shared"]}
    wire = min(wires, key=lambda name: wires[name])
    return wire, wires[wire] + seconds["local"]


def byte_matrix(plan: Plan) -> list[list[int]]:
    """Return bytes as [source rank][target rank]; on the diagonal those copied within a rank."""
    size = max(plan.ranks) + 1
    matrix = [[0] * size for _ in range(size)]
    for round_ in plan.rounds:
        for move in round_.moves:
            itemsize = (plan.target.dtype if move.local else plan.wire_dtype).itemsize
            matrix[move.source_rank][move.target_rank] += move.numel * itemsize
    return matrix


class Floor:
    """Holds the buffers of one direction of a pair and measures the exchanges between them."""

    def __init__(self, device: Device, matrix: list[list[int]]):
        self.device, me, world = device, dist.get_rank(), len(matrix)
        self.sent = [0 if peer == me else matrix[me][peer] for peer in range(world)]
        self.received = [0 if peer == me else matrix[peer][me] for peer in range(world)]
        self.moved = sum(nbytes for i, row in enumerate(matrix) for j, nbytes in enumerate(row) if i != j)
        """Bytes sent between ranks, summed over all ranks."""
        self.packed = sum(self.sent)
        with device.owner("buckets"):
            sizes = max(sum(matrix[me]), 1), max(sum(self.received), sum(matrix[me]), 1)
            self.send, self.receive = (
                torch.zeros(size, dtype=torch.uint8, device=device.torch_device) for size in sizes
            )
        handles = gather_bytes(device.share([self.send]), dist.group.WORLD)
        mapped = {peer: device.map(handles[peer], [None])[0] for peer, nbytes in enumerate(self.received) if nbytes}
        self.peers = []
        """This rank's bytes in every rank's send buffer, as views of it."""
        for peer, row in enumerate(matrix):
            start = sum(nbytes for other, nbytes in enumerate(row[:me]) if other != peer)
            self.peers.append(mapped[peer][start : start + row[me]] if peer in mapped else self.send[:0])

    def measure(self) -> dict[str, float]:
        """Run every wire and copy once; return their seconds."""
        packed, source, target = self.packed, self.send, self.receive[: len(self.send)]
        works = {
            "all_to_all": self._all_to_all,
            "p2p": self._p2p,
            "shared": self._shared,
            "memcpy": lambda: target[:packed].copy_(source[:packed]),
            "local": lambda: target[packed:].copy_(source[packed:]),
        }
        return {name: wall(self.device, work) for name, work in works.items()}

    def _all_to_all(self) -> None:
        receive, send = self.receive[: sum(self.received)], self.send[: self.packed]
        dist.all_to_all_single(receive, send, self.received, self.sent)

    def _p2p(self) -> None:
        operations = [
            dist.P2POp(kind, piece, peer)
            for kind, buffer, sizes in ((dist.irecv, self.receive, self.received), (dist.isend, self.send, self.sent))
            for peer, piece in enumerate(buffer[: sum(sizes)].split(sizes))
            if piece.numel()
        ]
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()

    def _shared(self) -> None:
        pieces = self.receive[: sum(self.received)].split(self.received)
        for into, piece in zip(pieces, self.peers, strict=True):
            into.copy_(piece)
