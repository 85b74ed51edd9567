"""Measure what the queue's own processes cost a node: CPU time to start, and resident memory.

python benchmarks/distqueue.py --only processes

actor_*, shard_*    the queue's actor, and the shard of its node
idle_*              floor: an actor of Ray that does nothing
*_cpu_s             user and system time from the start of the process until it serves calls
*_rss_mb            resident memory after some puts, gets and acks; *_private_mb: the part that no other process shares

Queue and idle actor are started in turn, in rotating order, several times; figures are medians.
"""

from __future__ import annotations

import statistics
from typing import Any

import ray
import torch

from benchmarks.local_ray import start_ray
from benchmarks.rotation import in_rotation
from distqueue import DistQueue, PackedBatch
from distqueue.actor_calls import run


def measure(starts: int = 5, rounds: int = 20) -> dict[str, float]:
    """Return the figures by name: medians over ``starts`` of each process, with ``rounds`` puts in every queue."""
    start_ray(num_cpus=1)
    figures: dict[str, list[float]] = {}
    for start in range(starts):
        for side in in_rotation(["queue", "idle"], start):
            for name, value in (_measure_queue(rounds) if side == "queue" else _measure_idle()).items():
                figures.setdefault(name, []).append(value)
    ray.shutdown()
    return {name: statistics.median(values) for name, values in figures.items()}


def _measure_queue(rounds: int) -> dict[str, float]:
    queue = DistQueue.create(["train"])
    ((_, shard),) = run(queue._call("where")).values()
    actors = {"actor": queue._actor, "shard": shard}
    figures = {f"{name}_cpu_s": _usage(actor)["cpu_s"] for name, actor in actors.items()}
    for round in range(rounds):
        ids = [f"{round}-{row}" for row in range(64)]
        queue.put(PackedBatch.from_samples(ids, {"tokens": [torch.arange(1000)] * len(ids)}))
        queue.ack("train", queue.get("train", ["tokens"], len(ids)).ids)
    for name, actor in actors.items():
        figures |= {f"{name}_{key}": value for key, value in _usage(actor).items() if key != "cpu_s"}
    queue.close()
    return figures


def _measure_idle() -> dict[str, float]:
    class Idle:  # pickled by value, so that its process imports nothing of this file
        pass

    idle = ray.remote(Idle).options(num_cpus=0).remote()
    figures = {f"idle_{key}": value for key, value in _usage(idle).items()}
    ray.kill(idle)
    return figures


def _usage(actor: Any) -> dict[str, float]:
    def usage(_: Any) -> dict[str, float]:
        import os
        from pathlib import Path

        kb: dict[str, int] = {}
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
            name, size, *_ = line.split()
            kb[name.rstrip(":")] = int(size)
        return {
            "cpu_s": sum(os.times()[:2]),
            "rss_mb": kb["Rss"] * 1024 / 1e6,
            "private_mb": (kb["Private_Clean"] + kb["Private_Dirty"]) * 1024 / 1e6,
        }

    return ray.get(actor.__ray_call__.remote(usage))
