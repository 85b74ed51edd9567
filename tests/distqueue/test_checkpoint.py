"""A queue goes on from a checkpoint of another: one Ray cluster for all tests of this file."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import ray

from distqueue import DistQueue, PackedBatch, QueueDrained
from distqueue.checkpoint import CUT, Unfinished, load, release_freed
from distqueue.core import QueueCore
from distqueue.fleet import ShardHandle
from distqueue.inspection import journal_state
from distqueue.payload.buffers import BufferPool
from distqueue.payload.columns import gather_columns
from distqueue.payload.segment_file import SegmentFile
from distqueue.samples import Selection
from tests.distqueue.faults import kill, make_batch, same
from tests.distqueue.power_loss import HERE, Direct, PlainActor, put
from tests.machine import patience
from tests.warm import use_ray

COLUMNS = ["tokens", "score", "text"]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> None:
    use_ray()


def ids_of(first: int, stop: int) -> list[str]:
    return [f"s{n}" for n in range(first, stop)]


def create_with_everything(**options: Any) -> DistQueue:
    """Samples that are done, dropped, acknowledged by one task, leased, and of one column only; two puts of each."""
    queue = DistQueue.create(["reward", "train"], lease_s=600.0, **options)
    for first in (0, 4, 8):
        batch = make_batch(ids_of(first, first + 4))
        groups = [f"g{(first + k) // 2}" for k in range(4)]
        queue.put(batch.select(columns=["tokens"]), groups, [first] * 4)
        if first < 8:
            queue.put(batch.select(columns=["score", "text"]))
    for task, count in (("reward", 6), ("train", 2)):
        queue.ack(task, queue.get(task, COLUMNS, count, timeout_s=patience(30)).ids)
    queue.drop(["s2"], "stale")
    assert queue.get("train", COLUMNS, 2, timeout_s=patience(30)).ids == ("s3", "s4"), "leased when it is written"
    return queue


def durable(queue: DistQueue) -> dict[str, float]:
    stats = queue.stats()
    return {name: stats[f"distqueue/{name}"] for name in ("rows", "bytes", "late", "ended/done", "ended/dropped:stale")}


def check_it_goes_on(queue: DistQueue, stale: int = 1) -> None:
    """As `create_with_everything` left it."""
    got = queue.get("train", COLUMNS, 5, timeout_s=patience(30))
    assert got.ids == ("s3", "s4", "s5", "s6", "s7") and same(got), "what was leased is open"
    assert got.groups == ("g1", "g2", "g2", "g3", "g3") and [span[0] for span in got.versions] == [0, 4, 4, 4, 4]
    assert queue.get("reward", COLUMNS, 2, timeout_s=patience(30)).ids == ("s6", "s7"), "s3 to s5 are acknowledged"
    assert queue.put(make_batch(["s2"]).select(columns=["score"])) == ("s2",), "late still"
    with pytest.raises(ValueError, match="sample 's0': every task has acknowledged it"):
        queue.put(make_batch(["s0"]))
    queue.put(make_batch(ids_of(8, 12)).select(columns=["score", "text"]))
    queue.put(make_batch(["new", "newer"]), ["n", "n"])
    queue.seal()
    rest = queue.get("train", COLUMNS, 99, timeout_s=patience(30))
    assert list(rest.ids) == [*ids_of(8, 12), "new", "newer"] and same(rest)
    queue.ack("train", got.ids + rest.ids)
    queue.ack("reward", ["s6", "s7", *queue.get("reward", COLUMNS, 99, timeout_s=patience(30)).ids])
    with pytest.raises(QueueDrained):
        queue.get("train", COLUMNS, 1)
    assert durable(queue) == {"rows": 0, "bytes": 0, "late": 1, "ended/done": 13, "ended/dropped:stale": stale}


class Before(NamedTuple):
    queue: DistQueue
    folder: str
    """Of its checkpoint"""
    was: dict[str, float]


def checkpointed(folder: Path, **options: Any) -> Iterator[Before]:
    queue = create_with_everything(**options)
    was = durable(queue)
    queue.checkpoint(str(folder / "checkpoint"))
    queue.put(make_batch(["after", "wards"]), ["a", "a"])
    yield Before(queue, str(folder / "checkpoint"), was)
    queue.close()


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Before]:
    yield from checkpointed(tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def in_journal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Before]:
    folder = tmp_path_factory.mktemp("journal")
    yield from checkpointed(folder, durability="journal", journal=str(folder / "journal"))


def test_a_queue_in_memory_goes_on_from_the_checkpoint_of_a_journalled_one(in_journal: Before) -> None:
    assert journal_state(Path(in_journal.folder))["stats"]["distqueue/rows"] == in_journal.was["rows"]
    queue = DistQueue.create(["reward", "train"], lease_s=600.0, checkpoint=in_journal.folder)
    assert durable(queue) == in_journal.was
    check_it_goes_on(queue)
    queue.close()
    assert len(list((Path(in_journal.folder) / "segments").iterdir())) == 5, "it can be gone on from again"


def test_a_journalled_queue_goes_on_from_one_in_memory_and_then_from_its_journal(
    in_memory: Before, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"durability": "journal", "journal": str(tmp_path / "journal")}
    queue = DistQueue.create(["reward", "train"], lease_s=600.0, checkpoint=in_memory.folder, **options)
    assert durable(queue) == in_memory.was
    queue.put(make_batch(["x", "y"]), ["z", "z"])
    queue.drop(["x", "y"], "stale")
    kill(queue._actor)
    assert durable(queue) == in_memory.was | {"ended/dropped:stale": 3}, "not from the checkpoint again"
    check_it_goes_on(queue, stale=3)
    queue.close()


def test_a_checkpoint_is_of_one_instant_while_samples_pass(in_memory: Before, tmp_path: Path) -> None:
    """Ids are put in order by one writer and ended in order by one reader: what is in a checkpoint is a stretch of
    them, and every payload is whole though files are written again and again meanwhile."""
    queue, stop, written, ended = in_memory.queue, threading.Event(), [0], [0]
    numbers = [f"t{n}" for n in range(1 << 16)]

    def write() -> None:
        while not stop.is_set():
            ids = numbers[written[0] : written[0] + 4]
            queue.put(make_batch(ids), [id[:-1] + "abcdefghij"[int(id[-1]) // 2] for id in ids])
            written[0] += 4

    def read() -> None:
        while not stop.is_set():
            if written[0] - ended[0] < 12:
                stop.wait(0.001)
            else:
                queue.drop(numbers[ended[0] : ended[0] + 3], "seen")
                ended[0] += 3

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(write), pool.submit(read)]
        try:
            while not ended[0] and not any(future.done() for future in running):
                stop.wait(0.01)
            bounds = []
            for k in range(8):
                before = written[0], ended[0]
                queue.checkpoint(str(tmp_path / str(k)))
                bounds.append((*before, written[0] + 4, ended[0] + 3))
        finally:
            stop.set()
        for future in running:
            future.result()
    assert bounds[-1][0] > bounds[0][2], "they go on meanwhile"
    for k, (put_before, ended_before, put_after, ended_after) in enumerate(bounds):
        batch = everything(tmp_path / str(k))
        passing = [int(id[1:]) for id in batch.ids if id[0] == "t"]
        assert same(batch) and passing == list(range(passing[0], passing[-1] + 1))
        assert ended_before <= passing[0] <= ended_after and put_before <= passing[-1] + 1 <= put_after


class Gated:
    """A shard that begins to copy when it may."""

    def __init__(self, shard: Direct) -> None:
        self.shard, self.asked, self.may = shard, asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shard, name)

    @property
    def copy(self) -> Any:
        return SimpleNamespace(remote=self._copy)

    async def _copy(self, segments: Sequence[tuple[int, str, str]]) -> list[int]:
        self.asked.set()
        await self.may.wait()
        return await self.shard.copy.remote(segments)


def test_memory_that_a_snapshot_has_freed_is_returned_to_the_system() -> None:
    blocks = [bytes(2000) for _ in range(20_000)]
    kept = blocks[::100]  # in the same pages as what is freed, up to the end of the heap
    del blocks
    before = resident_bytes()
    release_freed()
    assert before - resident_bytes() > 20 << 20 and len(kept) == 200


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_ends_or_moves_before_it_is_copied_is_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    monkeypatch.setattr("distqueue.checkpoint.release_freed", lambda: released.append(True))

    async def main() -> None:
        actor = PlainActor(tmp_path / "journal")
        await actor.start()
        for id in ("stays", "ends", "moves"):
            await put(actor, make_batch([id]))
        shard = Gated(actor.fleet.shards[HERE].actor)
        actor.fleet.shards[HERE] = ShardHandle(HERE, shard)
        writing = asyncio.create_task(actor.checkpoint(str(tmp_path / "checkpoint"), "cut"))
        await shard.asked.wait()
        ends, moves = actor.core.locate(["ends", "moves"], COLUMNS).places
        await actor.change("drop", ["ends"], "seen")
        os.rename(moves.path, moves.path + "-moved")
        actor.core.moved(moves.number, HERE, moves.path + "-moved")
        await put(actor, make_batch(["later"]))
        shard.may.set()
        await writing
        assert not os.path.exists(ends.path) and ends.number not in actor.core.ledger.segments
        await actor.close()

    asyncio.run(main())
    batch = everything(tmp_path / "checkpoint")
    assert batch.ids == ("stays", "ends", "moves") and same(batch) and released == [True]


def everything(folder: Path) -> PackedBatch:
    """What can be read in a checkpoint, without a queue."""
    core = QueueCore.recover(load(str(folder)), ())
    taken = core.table.take(Selection("train", tuple(COLUMNS), partial=True), 0.0)
    assert taken is not None
    found = core.locate(taken.ids, COLUMNS)
    sources = [SegmentFile(folder / place.path).columns(place.number) for place in found.places]
    return PackedBatch(found.ids, gather_columns(found.parts, sources, BufferPool()))


def test_a_checkpoint_is_written_once_and_whole(in_journal: Before, tmp_path: Path) -> None:
    queue, other = in_journal.queue, tmp_path / "other"
    with pytest.raises(ValueError, match="checkpoint='.*/checkpoint': it exists already; expected a new folder"):
        queue.checkpoint(in_journal.folder)
    with pytest.raises(ValueError, match="checkpoint='here': expected an absolute path"):
        queue.checkpoint("here")
    with Unfinished(str(other), "cut"), pytest.raises(ValueError, match="other.partial: another queue has it open"):
        queue.checkpoint(str(other))
    assert not list(tmp_path.iterdir())
    (tmp_path / "other.partial" / "segments").mkdir(parents=True)
    (tmp_path / "other.partial" / "segments" / "left").touch()
    for _ in range(2):
        ray.get(queue._actor.checkpoint.remote(str(other), "cut"))  # again, as its answer was not heard
    assert (other / CUT).read_text() == "cut"
    assert not (other / "segments" / "left").exists(), "what a killed process left is not in it"


def test_what_does_not_go_on_from_a_checkpoint_is_refused_by_name(in_journal: Before, tmp_path: Path) -> None:
    folder = in_journal.folder
    journal = str(Path(folder).with_name("journal"))

    def refused(message: str, *tasks: str, **options: Any) -> None:
        given: dict[str, Any] = {"checkpoint": folder} | options
        with pytest.raises(ValueError, match=message):
            DistQueue.create(tasks or ("reward", "train"), **given)

    refused("journal='.*/journal': it holds a queue; expected a new one", durability="journal", journal=journal)
    refused(r"tasks=\('train',\): checkpoint .* has tasks=\('reward', 'train'\)", "train")
    refused("expected a folder written by DistQueue.checkpoint", checkpoint=str(tmp_path / "nothing"))
    refused("expected a folder written by DistQueue.checkpoint", checkpoint=journal)
    refused("checkpoint='checkpoint': expected an absolute path", checkpoint="checkpoint")
    shutil.copytree(folder, tmp_path / "half")
    next((tmp_path / "half" / "segments").iterdir()).unlink()
    refused(r"1 of its files are missing, such as segments/\d+", checkpoint=str(tmp_path / "half"))
