"""Read one queue as the ranks of a trainer for `benchmarks/distqueue_hierarchy.py`: each for itself, or by a leader."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from benchmarks.distqueue_reads import flat_reads, leader_reads, requests
from benchmarks.local_ray import start_ray
from distqueue import DistQueue, PackedBatch
from distqueue.hierarchy import GroupReader
from distqueue.hierarchy.tree import Member
from fusion.model import Parallel

ROOT = str(Path(__file__).resolve().parents[1])
LAYOUT, LARGE = Parallel(8, tp=2, pp=2), Parallel(2048, tp=8, pp=16)
FIRST, LAST = ("prompt", "response"), ("response", "behaviour_logprobs", "ref_logprobs", "advantage")
SAMPLES = 64
"""Samples per batch of one replica."""


def needs(layout: Parallel, rank: int) -> tuple[str, ...]:
    """Return the columns of this rank's pipeline stage; stages between the first and the last need only lengths."""
    return {0: FIRST, layout.pp - 1: LAST}.get(layout.coordinate("pp", rank), ())


def replica(layout: Parallel, number: int) -> list[int]:
    return [rank for rank in range(layout.world) if layout.coordinate("dp", rank) == number]


def make_batch(ids: Sequence[str], seed: int) -> PackedBatch:
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(32, 513, (len(ids),), generator=random).tolist()
    responses = (7 + torch.randn(len(ids), generator=random)).exp().clamp(1, 8192).int().tolist()
    columns = {
        "prompt": [torch.randint(1 << 15, (size,), generator=random) for size in prompts],
        "response": [torch.randint(1 << 15, (size,), generator=random) for size in responses],
        "behaviour_logprobs": [torch.randn(size, generator=random) for size in responses],
        "ref_logprobs": [torch.randn(size, generator=random) for size in responses],
        "advantage": torch.randn(len(ids), generator=random),
    }
    return PackedBatch.from_samples(ids, columns)


class Rank:
    """Reads as one rank of a trainer. Methods are called on all ranks at once."""

    def __init__(self, rank: int, queue: DistQueue):
        self.rank, self.queue, self.columns = rank, queue, needs(LAYOUT, rank)
        self.replica = LAYOUT.coordinate("dp", rank)
        self.reader: GroupReader | None = None

    def address(self) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def join(self, address: str, warm_up: list[list[str]]) -> None:
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=LAYOUT.world)
        groups = [dist.new_group(replica(LAYOUT, number)) for number in range(LAYOUT.dp)]
        self.reader = GroupReader(self.queue, groups[self.replica], self.columns)
        self.queue.read(warm_up[self.replica], self.columns)  # locates the queue's shards
        self.reader.read(warm_up[self.replica])

    def read(self, way: str, batches: list[list[list[str]]]) -> dict[str, int]:
        """Read the ids ``batches[batch][replica]``; return the requests and bytes of this rank.

        ``way``: ``flat`` (every rank requests for itself) or ``leader`` (one rank per replica requests).
        """
        assert self.reader is not None
        before = self.exchanged()
        for shares in batches:
            ids = shares[self.replica]
            batch = self.queue.read(ids, self.columns) if way == "flat" else self.reader.read(ids).batch
            assert batch.ids == tuple(ids) and set(batch.columns) == set(self.columns)
        return {what: count - before[what] for what, count in self.exchanged().items()}

    def exchanged(self) -> dict[str, int]:
        """Return requests and bytes since this process started, exchanged with the queue and with its group."""
        assert self.reader is not None
        traffic = self.queue.traffic
        return {
            "requests": traffic.requests,
            "bytes": traffic.received_bytes,
            "group_bytes": self.reader.sent_bytes,
        }


def measure(batches: int = 8) -> dict[str, Any]:
    """Return the figures that `benchmarks/distqueue_hierarchy.py` explains.

    Uses the running Ray, or starts one and shuts it down.
    """
    ours = not ray.is_initialized()
    if ours:
        start_ray(num_cpus=os.cpu_count() or 1)
    queue = DistQueue.create(["train"])
    actor = ray.remote(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}})(Rank)
    ranks = [actor.remote(rank, queue) for rank in range(LAYOUT.world)]
    try:
        return _count(queue, ranks, batches)
    finally:
        for rank in ranks:
            ray.kill(rank)
        queue.close()
        if ours:
            ray.shutdown()


def _count(queue: DistQueue, ranks: list[Any], batches: int) -> dict[str, Any]:
    shares = [[[f"{b}-{d}-{i}" for i in range(SAMPLES)] for d in range(LAYOUT.dp)] for b in range(batches + 1)]
    nbytes: dict[str, int] = dict.fromkeys((*FIRST, *LAST), 0)
    for number, batch in enumerate(shares):
        for d, ids in enumerate(batch):
            packed = make_batch(ids, number * LAYOUT.dp + d)
            queue.put(packed)
            for name in nbytes if number else ():
                nbytes[name] += packed[name].buffer.nbytes
    address = ray.get(ranks[0].address.remote())
    ray.get([rank.join.remote(address, shares[0]) for rank in ranks])
    figures: dict[str, Any] = {}
    for way in ("flat", "leader"):
        counts = ray.get([rank.read.remote(way, shares[1:]) for rank in ranks])
        figures |= {f"{what}_{way}": sum(count[what] for count in counts) for what in counts[0]}
    assert figures.pop("group_bytes_flat") == 0
    figures["group_bytes"] = figures.pop("group_bytes_leader")
    return figures | {"floor_bytes": sum(nbytes.values())} | large(nbytes)


def large(nbytes: dict[str, int]) -> dict[str, int]:
    """Count requests and payload bytes for one batch per replica in TP8 PP16. ``nbytes``: bytes by column."""
    members = [Member(i, "", frozenset(needs(LARGE, rank))) for i, rank in enumerate(replica(LARGE, 0))]
    flat, leader = requests(LARGE.world, len(members))
    return {
        "requests_flat_tp8_pp16": flat,
        "requests_leader_tp8_pp16": leader,
        "bytes_flat_tp8_pp16": LARGE.dp * flat_reads(members, nbytes).nbytes,
        "bytes_leader_tp8_pp16": LARGE.dp * leader_reads(members, nbytes).nbytes,
    }
