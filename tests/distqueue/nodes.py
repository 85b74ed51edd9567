"""Several nodes, played by several raylets of one machine, and clients of a queue on any of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distqueue import DistQueue, PackedBatch
from stalesync.process.ray_cluster import set_environment
from tests.machine import patience, wait_for
from tests.warm import launcher


class Nodes:
    """A head, on which the queue's actor and this process run, and nodes that come and go."""

    def __init__(self, forked: bool) -> None:
        """``forked``: Ray's workers are forked from a process that has imported torch."""
        # A dead node is missed sooner, a slow one is not taken for dead.
        often = {"health_check_period_ms": 200, "health_check_initial_delay_ms": 200}
        often["health_check_timeout_ms"] = round(1000 * patience(10))
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": often}
        ray.shutdown()
        set_environment(None)  # a test may have changed it since this process's Ray has read it
        self._forked = forked
        with self._starting():
            self.cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.head = ray.get_runtime_context().get_node_id()
        self.beside: Any = None

    def other(self) -> Any:
        """A node beside the head: the one of earlier tests, or a new one."""
        if self.beside is None:
            with self._starting():
                self.beside = self.cluster.add_node(num_cpus=1)
        return self.beside

    def _starting(self) -> AbstractContextManager[None]:
        return launcher().forked_workers() if self._forked else nullcontext()

    def kill_other(self) -> None:
        """Returns when it is missed."""
        if (node := self.beside) is None:
            return
        self.beside = None
        self.cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: not [n for n in ray.nodes() if n["Alive"] and n["NodeID"] == node.node_id], 60)

    def at(self, node: str, queue: DistQueue) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(Client).options(num_cpus=0, scheduling_strategy=strategy).remote(queue)


class Client:
    """A process of a node."""

    def __init__(self, queue: DistQueue) -> None:
        self.queue = queue

    def put(self, *ids: str, length: int = 1000) -> None:
        self.queue.put(batch_of(*ids, length=length))

    def get(self, count: int) -> tuple[tuple[str, ...], bool, int]:
        """(ids, whether all is right, bytes that came)."""
        return self._get(count)

    def get_some(self, count: int) -> tuple[tuple[str, ...], bool, int]:
        """At most so many, of what is there."""
        return self._get(count, partial=True)

    def _get(self, count: int, **options: Any) -> tuple[tuple[str, ...], bool, int]:
        before = self.queue.traffic.received_bytes
        batch = self.queue.get("train", ["tokens", "text"], count, timeout_s=patience(60), **options)
        wanted = batch_of(*batch.ids, length=len(batch["tokens"][0]))
        right = all(torch.equal(batch[name].buffer, wanted[name].buffer) for name in wanted.columns)
        self.queue.ack("train", batch.ids)
        return batch.ids, right, self.queue.traffic.received_bytes - before


def batch_of(*ids: str, length: int = 1000) -> PackedBatch:
    tokens = [torch.arange(length, dtype=torch.int32) + sum(id.encode()) for id in ids]
    return PackedBatch.from_samples(ids, {"tokens": tokens, "text": list(ids)})


@contextmanager
def started_nodes(forked: bool) -> Iterator[Nodes]:
    """Shut down at the end."""
    nodes = Nodes(forked)
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()
