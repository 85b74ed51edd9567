"""Time the sides of `benchmarks/switch.py` on its ranks: the switch, and its bytes over the fastest wire.

    wire     the pair's byte matrix in one exchange, contiguous, between allocated and warm buffers:
             all_to_all   one `all_to_all_single` with uneven splits
             p2p          one batch of sends and receives, one message per pair of ranks
             shared       every rank reads its bytes from the sender's memory (cards of one machine), unpacked
    memcpy   one contiguous copy of the bytes that must be packed for `all_to_all` and `p2p`
    local    one contiguous copy of the bytes that stay on their rank but change storage

    floor = min(shared, min(all_to_all, p2p) + memcpy) + local

Not included: unpacking, allocating and freeing memory, and keeping order and bounds.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Figures, in_turns, progress
from benchmarks.switch import PAIRS, end
from fusion.ep_switch import Plan
from fusion.model import ModelConfig
from fusion.model.formats import EMBEDDED
from fusion.npu import Device
from fusion.npu.all_or_none import gather_bytes
from tests.ep_switch import megatron_peer
from tests.ep_switch.mutants import frees_nothing, in_layer_order
from tests.ep_switch.pair import Pair, wall
from tests.helpers import end_ranks, run_ranks, tiny_config

WORLD, TIMEOUT_S = 4, 3600


def moe_of(args: Namespace) -> ModelConfig:
    """Return a Qwen3-MoE of ``args.layers`` layers with ``args.hidden`` channels: 89M parameters of 8 with 512."""
    return tiny_config(
        vocab_size=32 * args.hidden,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=args.hidden // 8,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=21 * args.hidden // 32,
        tie_word_embeddings=False,
    )


def measure(args: Namespace) -> Figures:
    """Measure every pair in fresh processes, one per rank."""
    if missing := megatron_peer.why_not():
        print(f"Megatron-Core is not measured: {missing} (pip install -r requirements/megatron.txt)")
    figures: Figures = {}
    for pair in args.pairs.split(",") if args.pairs else PAIRS:
        one, other = PAIRS[pair]
        both_ways, *_ = run_ranks(measure_pair, WORLD, moe_of(args), (one, other), args.rounds, timeout_s=TIMEOUT_S)
        end_ranks()
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
        floor = {name: statistics.median(one[source][name] for one in by_side["floor"]) for name in Floor.NAMES}
        wire, floor_s = floor_of(floor)
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
    """Return the fastest wire, including the packing that it requires, and the floor in seconds.

    ``seconds``: those of every wire, of `memcpy` and of `local`.
    """
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

    NAMES = ("all_to_all", "p2p", "shared", "memcpy", "local")

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
