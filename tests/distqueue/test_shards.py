"""Shards of several nodes, played by several raylets of one machine: rows stay where they were written, readers
elsewhere get exactly what they asked for, shards join, leave and fill up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from distqueue import DistQueue, LostSample, PackedBatch, SamplesLost
from tests.distqueue.nodes import Nodes, batch_of, started_nodes
from tests.machine import patience, wait_for


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with started_nodes(forked=True) as nodes:
        yield nodes


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
    assert queue._call("where")[home][0] == nodes.head, "a node without a shard writes to another"
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
    shard = {name: node for name, (node, _) in queue._call("where").items()}
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


def damage(queue: DistQueue, first: str, token: int) -> None:
    """Flips a bit of this token of the `large` samples that were put together, where they are stored; `first`: of
    them."""
    begin = large(first)["tokens"][0][:4].numpy().tobytes()
    folders = [Path(shard["folder"]) for shard in queue.state()["shards"]]
    path = next(path for folder in folders for path in folder.iterdir() if begin in path.read_bytes())
    content = path.read_bytes()
    with open(path, "r+b") as file:
        at = content.index(begin) + 4 * token
        file.seek(at)
        file.write(bytes([content[at] ^ 4]))


def large(*ids: str) -> PackedBatch:
    return batch_of(*ids, length=10_000)


@pytest.mark.parametrize("reads_from", ["here", "elsewhere"])
def test_a_damaged_sample_ends_by_name_and_the_others_are_delivered(
    nodes: Nodes, reads_from: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = DistQueue.create(["train"], name=f"damaged-{reads_from}")
    queue.put(large("aa", "bb", "cc"), groups=["g"] * 3)
    queue.put(large("dd"), groups=["h"])
    damage(queue, "aa", 10_007)
    if reads_from == "here":
        batch = queue.get("train", ["tokens", "text"], 4, partial=True, timeout_s=patience(60))
        ids = batch.ids
        assert torch.equal(batch["tokens"].buffer, large(*ids)["tokens"].buffer)
        (line,) = [record.message for record in caplog.records if "is damaged" in record.message]
        assert line.startswith(f"queue 'damaged-{reads_from}', sample 'bb': column 'tokens' in /dev/shm/distqueue-")
        assert line.endswith(" is damaged: its checksum differs; these samples end as lost:damaged")
    else:
        reader = nodes.at(nodes.other().node_id, queue)
        ids, right, _ = ray.get(reader.get_some.remote(4), timeout=patience(60))
        assert right
    assert ids == ("aa", "cc", "dd")
    assert queue.lost() == [LostSample("bb", "g", "lost:damaged")]
    assert queue.stats()["distqueue/ended/lost:damaged"] == 1
    with pytest.raises(SamplesLost, match="^sample 'bb': lost:damaged$"):
        queue.read(["bb"], ["tokens"])
    queue.close()


def test_a_read_by_id_names_what_is_damaged(nodes: Nodes) -> None:
    nodes.kill_other()
    queue = DistQueue.create(["train"], name="named")
    queue.put(large("aa", "bb"))
    damage(queue, "aa", 7)
    said = (
        "^sample 'aa': lost:damaged; queue 'named', sample 'aa': column 'tokens' in /dev/shm/.* its checksum differs$"
    )
    with pytest.raises(SamplesLost, match=said) as error:
        queue.read(["aa", "bb"], ["text", "tokens"])
    assert error.value.ids == ("aa",)
    assert queue.read(["bb"], ["text"])["text"][0] == "bb"
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
