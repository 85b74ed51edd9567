"""Measure what the queue's own processes cost a node: CPU time to start, and resident memory.

python benchmarks/distqueue.py --only processes

actor_*, shard_*    the queue's actor, and the shard of its node, after some puts, gets and acks
idle_*              floor: an actor of Ray that does nothing
*_cpu_s             user and system time from the start of the process
*_rss_mb            resident memory; *_private_mb: the part of it that no other process shares
"""

from __future__ import annotations

import logging
from typing import Any

import ray
import torch

from distqueue import DistQueue, PackedBatch
from distqueue.actor_calls import run


def measure(rounds: int = 20) -> dict[str, float]:
    """Return the figures by name."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    queue = DistQueue.create(["train"])
    for round in range(rounds):
        ids = [f"{round}-{row}" for row in range(64)]
        queue.put(PackedBatch.from_samples(ids, {"tokens": [torch.arange(1000)] * len(ids)}))
        queue.ack("train", queue.get("train", ["tokens"], len(ids)).ids)
    ((_, shard),) = run(queue._call("where")).values()

    class Idle:  # pickled by value, so that its process imports nothing of this file
        pass

    idle = ray.remote(Idle).options(num_cpus=0).remote()
    figures = {}
    for name, actor in (("actor", queue._actor), ("shard", shard), ("idle", idle)):
        figures |= {f"{name}_{key}": value for key, value in _usage(actor).items()}
    queue.close()
    ray.shutdown()
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
