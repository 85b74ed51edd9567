"""The queue's actor and its shards, whatever they do, do not load torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from distqueue import DistQueue, PackedBatch
from tests.distqueue.faults import kill
from tests.distqueue.nodes import Nodes, batch_of, started_nodes


def assert_without_torch(queue: DistQueue, after: str) -> None:
    """The queue's actor and each of its shards answer that they have not loaded torch, nor what loads it."""
    unwanted = {"torch", "distqueue.column", "distqueue.client", "tests.distqueue.nodes"}
    processes = {"actor": queue._actor} | {name: actor for name, (_, actor) in queue._call("where").items()}
    for name, process in processes.items():
        loaded = ray.get(process.__ray_call__.remote(lambda _: sorted(unwanted & set(sys.modules))))
        assert loaded == [], f"{name}, after {after}"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with started_nodes(forked=False) as nodes:
        yield nodes


@pytest.mark.extended
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
    queue.put(PackedBatch(("d",), {}), claim="train")
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
    kill(queue._actor, *(actor for _, actor in queue._call("where").values()))
    assert queue.read(["j"], ["tokens"])["tokens"][0].shape == (1000,)
    assert_without_torch(queue, "recovery from the journal")
    queue.close()
