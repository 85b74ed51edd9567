"""Shards of several nodes, played by several raylets of one machine: rows stay where they were written, readers
elsewhere get exactly what they asked for, shards join, leave and fill up, and no process of the queue loads torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distqueue import DistQueue, PackedBatch
from distqueue.actor_calls import run
from tests.machine import patience, wait_for


class Nodes:
    """A head, on which the queue's actor and this process run, and nodes that come and go."""

    def __init__(self) -> None:
        # A dead node is missed sooner, a slow one is not taken for dead.
        often = {"health_check_period_ms": 200, "health_check_initial_delay_ms": 200}
        often["health_check_timeout_ms"] = round(1000 * patience(10))
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": often}
        ray.shutdown()
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.head = ray.get_runtime_context().get_node_id()
        self.beside: Any = None

    def other(self) -> Any:
        """A node beside the head: the one of earlier tests, or a new one."""
        if self.beside is None:
            self.beside = self.cluster.add_node(num_cpus=1)
        return self.beside

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
        before = self.queue.traffic.received_bytes
        batch = self.queue.get("train", ["tokens", "text"], count, timeout_s=patience(60))
        wanted = batch_of(*batch.ids, length=len(batch["tokens"][0]))
        right = all(torch.equal(batch[name].buffer, wanted[name].buffer) for name in wanted.columns)
        self.queue.ack("train", batch.ids)
        return batch.ids, right, self.queue.traffic.received_bytes - before


def batch_of(*ids: str, length: int = 1000) -> PackedBatch:
    tokens = [torch.arange(length, dtype=torch.int32) + sum(id.encode()) for id in ids]
    return PackedBatch.from_samples(ids, {"tokens": tokens, "text": list(ids)})


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


def held(queue: DistQueue) -> dict[str, int]:
    """Segments by shard."""
    return {shard["name"]: shard["segments"] for shard in queue.state()["shards"]}


def test_shards_join_and_leave_and_rows_are_drained(nodes: Nodes) -> None:
    nodes.kill_other()
    queue = DistQueue.create(["train"])
    other = nodes.other()
    stranger = nodes.at(other.node_id, queue)
    ray.get(stranger.put.remote("a"))
    (home,) = [name for name, segments in held(queue).items() if segments]
    assert run(queue._call("where"))[home][0] == nodes.head, "a node without a shard writes to another"
    name = queue.add_shard(other.node_id)
    assert queue.add_shard(other.node_id) == name, "one a node"
    ray.get(stranger.put.remote("b", "c"))
    assert held(queue)[name] == 1
    queue.remove_shard(other.node_id)
    assert set(held(queue)) == {home} and held(queue)[home] == 2
    assert ray.get(stranger.get.remote(3))[:2] == (("a", "b", "c"), True)
    with pytest.raises(ValueError, match="has the last shard of this queue"):
        queue.remove_shard(nodes.head)
    with pytest.raises(ValueError, match="it has no shard; shards are on"):
        queue.remove_shard(other.node_id)
    queue.put(batch_of("d"))
    queue.close()


def test_rows_stay_where_they_were_written_and_are_read_from_anywhere(nodes: Nodes) -> None:
    other = nodes.other()
    queue = DistQueue.create(["train"])
    here, there = nodes.at(nodes.head, queue), nodes.at(other.node_id, queue)
    shard = {name: node for name, (node, _) in run(queue._call("where")).items()}
    ray.get([here.put.remote("a", "b", "c"), there.put.remote("d", "e")])
    found = {shard[name]: segments for name, segments in held(queue).items()}
    assert found == {nodes.head: 1, other.node_id: 1}
    ids, right, nbytes = ray.get(there.get.remote(2))
    assert (ids, right) in [(("a", "b"), True), (("d", "e"), True)]
    assert nbytes < 2 * 4000 + 1000, "exactly the samples it asked for, not their segment"
    ids, right, _ = ray.get(here.get.remote(3))
    assert right and len(ids) == 3
    assert sum(held(queue).values()) == 0
    queue.close()


def test_what_a_lost_node_held_ends_by_name_and_the_rest_goes_on(nodes: Nodes) -> None:
    other = nodes.other()
    queue = DistQueue.create(["train"])
    there = nodes.at(other.node_id, queue)
    ray.get(there.put.remote("a", "b"))
    queue.put(batch_of("c"))
    nodes.kill_other()
    batch = queue.get("train", ["tokens"], 3, timeout_s=patience(60))
    assert batch.ids == ("c",)
    (lost,) = [name for name in queue.stats() if name.startswith("distqueue/ended/lost:shard-")]
    assert queue.stats()[lost] == 2 and queue.stats()["distqueue/rows"] == 1
    queue.close()


def test_a_full_shard_spills_to_disk_and_reads_it_back(nodes: Nodes, tmp_path: Path) -> None:
    nodes.kill_other()
    queue = DistQueue.create(["train"], max_bytes=40_000, spill=str(tmp_path / "spill"))
    for k in range(6):
        queue.put(batch_of(f"{k}a", f"{k}b"))
    stats, (shard,) = queue.stats(), queue.state()["shards"]
    assert stats["distqueue/spilled_bytes"] > 8_000 and shard["bytes"] <= 40_000
    spilled = list((tmp_path / "spill").rglob("*/*/*"))
    assert spilled
    batch = queue.get("train", ["tokens", "text"], 12, timeout_s=patience(60))
    wanted = batch_of(*batch.ids)
    assert len(batch) == 12 and torch.equal(batch["tokens"].buffer, wanted["tokens"].buffer)
    queue.ack("train", batch.ids)
    assert queue.stats()["distqueue/spilled_bytes"] == 0
    queue.close()
    assert not [path for path in spilled if path.exists()]


def test_a_full_queue_makes_writers_wait_with_a_message(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    nodes.kill_other()
    queue = DistQueue.create(["train"], max_rows=3)
    queue.put(batch_of("a", "b"))
    writer = nodes.at(nodes.head, queue)
    waiting = writer.put.remote("c", "d")
    wait_for(lambda: queue.state()["waiting_writers"], 60)
    assert queue.state()["waiting_writers"] == [
        "the queue holds 2 samples of max_rows=3; task 'train' has 2 to get and 0 to acknowledge"
    ]
    queue.put(PackedBatch.from_samples(["a"], {"reward": torch.ones(1)}))
    assert not ray.wait([waiting], timeout=0.2)[0], "what completes samples passes by; new ones wait"
    queue.ack("train", queue.get("train", ["tokens"], 1).ids)
    ray.get(waiting, timeout=patience(30))
    with pytest.raises(ValueError, match="a put of 4 new samples; this queue holds max_rows=3"):
        queue.put(batch_of(*"wxyz"))
    queue.close()


def test_a_file_that_vanished_ends_its_samples_by_name_instead_of_a_hang(nodes: Nodes) -> None:
    nodes.kill_other()
    queue = DistQueue.create(["train"])
    folder = Path(queue.state()["shards"][0]["folder"])
    queue.put(batch_of("a", "b"))
    queue.put(batch_of("c"))
    first, _ = sorted((found for found in folder.iterdir() if found.is_file()), key=lambda file: file.stat().st_mtime)
    first.unlink()
    reader = nodes.at(nodes.head, queue)
    assert ray.get(reader.get.remote(3), timeout=patience(60))[0] == ("c",)
    assert queue.stats()["distqueue/ended/lost:not found"] == 2
    queue.close()


def assert_without_torch(queue: DistQueue, after: str) -> None:
    """The queue's actor and each of its shards answer that they have not loaded torch, nor what loads it."""
    unwanted = {"torch", "distqueue.column", "distqueue.client", "tests.distqueue.test_shards"}
    processes = {"actor": queue._actor} | {name: actor for name, (_, actor) in run(queue._call("where")).items()}
    for name, process in processes.items():
        loaded = ray.get(process.__ray_call__.remote(lambda _: sorted(unwanted & set(sys.modules))))
        assert loaded == [], f"{name}, after {after}"


def test_no_process_of_the_queue_loads_torch_whatever_it_does(nodes: Nodes, tmp_path: Path) -> None:
    other = nodes.other()
    queue = DistQueue.create(["train"], max_bytes=40_000, spill=str(tmp_path / "spill"))
    assert_without_torch(queue, "its start")
    there = nodes.at(other.node_id, queue)
    queue.put(batch_of("a", "b"))
    queue.put(PackedBatch.from_samples(["a"], {"reward": torch.ones(1, dtype=torch.bfloat16)}))
    ray.get(there.put.remote("c"))
    assert_without_torch(queue, "puts of both nodes")
    assert ray.get(there.get.remote(3))[:2] == (("a", "b", "c"), True)
    assert_without_torch(queue, "a get of samples of both nodes")
    queue.put(batch_of("d"))
    queue.remove_shard(other.node_id)
    ray.get(there.put.remote("e", "f"))
    assert_without_torch(queue, "the removal of a shard, and a put from a node without one")
    queue.add_shard(other.node_id)
    for k in range(3):
        ray.get(there.put.remote(f"{k}g", f"{k}h"))
    queue.remove_shard(other.node_id)
    queue.put(batch_of("i", length=5000))
    assert queue.stats()["distqueue/spilled_bytes"] > 0
    assert_without_torch(queue, "a shard's draining and spilling")
    queue.claim("train", ["d"])
    assert queue.lengths(["d"], ["tokens"]) == {"tokens": [1000]}
    queue.give_back("train", ["d"])
    queue.drop(["e"], "unwanted")
    assert ray.get(there.get.remote(8))[:2] == (("d", "f", *(f"{k}{name}" for k in range(3) for name in "gh")), True)
    with pytest.raises(ValueError, match="sample 'i': column 'text' exists already"):
        queue.put(batch_of("i"))
    assert_without_torch(queue, "a claim, a drop, a get of spilled samples and an error")
    queue.checkpoint(str(tmp_path / "checkpoint"))
    assert_without_torch(queue, "a checkpoint")
    queue.close()

    options = {"durability": "journal", "journal": str(tmp_path / "journal")}
    queue = DistQueue.create(["train"], checkpoint=str(tmp_path / "checkpoint"), **options)
    queue.put(batch_of("j"))
    assert_without_torch(queue, "a checkpoint and a put")
    for actor in (queue._actor, *(actor for _, actor in run(queue._call("where")).values())):
        ray.kill(actor, no_restart=False)
    assert queue.read(["j"], ["tokens"])["tokens"][0].shape == (1000,)
    assert_without_torch(queue, "recovery from the journal")
    queue.close()
