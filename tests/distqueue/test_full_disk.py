"""A full disk or full shared memory is an error that says what is full and what to change, not the writer's death."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from distqueue import DistQueue, PackedBatch, QueueClosed, StorageFull
from distqueue.actor import QueueActor
from distqueue.config import QueueOptions
from distqueue.core import QueueCore
from distqueue.errors import JournalFull
from distqueue.fleet import Fleet, half_of
from distqueue.journal import INDEX, Journal
from distqueue.messages import File
from distqueue.payload.columns import stretches_of
from distqueue.payload.segment_file import SegmentFile, lay_out
from distqueue.payload.shard import Shard
from distqueue.payload.sweep import own
from distqueue.payload.wire import to_wire
from distqueue.samples import SampleTable
from tests.distqueue.core.cores import select
from tests.distqueue.faults import make_batch
from tests.distqueue.power_loss import PlainActor, put
from tests.distqueue.test_journal import files_of_at_most
from tests.warm import use_ray

MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of 2 MiB."""
    if os.getuid() != 0:
        pytest.skip("needs root: mounts a tmpfs")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def large(id: str, nbytes: int = 3 * MIB) -> PackedBatch:
    return PackedBatch.from_samples([id], {"large": torch.zeros(1, nbytes, dtype=torch.uint8)})


def write(path: Path, batch: PackedBatch) -> None:
    contents = lay_out(stretches_of(batch))
    SegmentFile(path, contents.nbytes).write(1, contents)


def test_a_segment_for_which_there_is_no_space_is_an_error_and_leaves_no_file(small: Path) -> None:
    write(small / "first", large("a", MIB))
    with pytest.raises(
        StorageFull, match=rf"^the disk is full: {small}/second: 3,14.* bytes were asked for, 1,0.* are"
    ):
        write(small / "second", large("b"))
    assert os.listdir(small) == ["first"]
    with pytest.raises(StorageFull):  # a file that is used again, and grows
        write(small / "first", large("c"))
    assert SegmentFile(small / "first").columns(1)["large"].data.nbytes == MIB, "as it was"
    write(small / "third", large("d", MIB // 2))


def test_without_the_reservation_the_writer_would_be_killed(small: Path) -> None:
    program = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 3 << 20)
mmap.mmap(file, 3 << 20)[:] = bytes(3 << 20)
"""
    assert subprocess.run([sys.executable, "-c", program, str(small / "file")]).returncode == -7  # SIGBUS


def test_a_shard_that_writes_for_another_node_spills_or_copies_says_so_too(small: Path, tmp_path_factory) -> None:
    home = Shard(str(tmp_path_factory.mktemp("memory") / "s"), str(small / "spill" / "s"))
    header, frames = to_wire(stretches_of(large("a")))
    file = File(number=1, path=str(small / "1"), size=4 * MIB, shard="s", node="", durable=False, lease_s=1.0)
    with pytest.raises(StorageFull, match=f"the disk is full: {small}/1: 4,194,304 bytes were asked for"):
        home.write(file, header, *frames)
    write(home.folder / "1", large("a"))
    for move in (
        lambda: home.spill(1, str(home.folder / "1"), str(small / "spill" / "s" / "1")),
        lambda: home.copy([(1, str(home.folder / "1"), str(small / "copy"))]),
    ):
        with pytest.raises(StorageFull, match=rf"^the disk is full: {small}/.* \(run.dir, or queue.spill for what"):
            move()


def test_a_queue_goes_on_after_a_put_that_found_no_space_and_ends_if_its_journal_does(small: Path) -> None:
    async def main() -> None:
        actor = PlainActor(small / "queue")
        await put(actor, make_batch(["a"]))
        with pytest.raises(StorageFull, match=f"^the disk is full: {small}/queue/segments/here/"):
            await put(actor, large("b"))
        actor.core.cancel(max(actor.core.writers.reserved), 0.0)  # as its client does
        await put(actor, make_batch(["c"]))
        filler = os.open(small / "filler", os.O_RDWR | os.O_CREAT)
        free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        os.posix_fallocate(filler, 0, free - (1 << 14))  # for a segment, not for what is told of it
        many = PackedBatch.from_samples([f"{n:0900}" for n in range(20)], {"x": torch.zeros(20, dtype=torch.int8)})
        with pytest.raises(QueueClosed, match=f"journal {small}/queue: the disk is full: {small}/queue/{INDEX}: "):
            await put(actor, many)
        await actor.close()
        os.ftruncate(filler, 0)
        again = PlainActor(small / "queue")
        await again.start()
        assert again.core.table.are_live(["a", "b", "c", many.ids[0]]).tolist() == [True, False, True, False]
        await again.close()

    asyncio.run(main())


def test_a_limit_on_files_is_named_as_such(tmp_path: Path) -> None:
    with files_of_at_most(MIB), pytest.raises(StorageFull, match="exceed this process's limit on the size of files"):
        write(tmp_path / "s", large("a"))


def test_shared_memory_is_named_with_the_keys_that_bound_it() -> None:
    huge = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize + MIB
    with pytest.raises(
        StorageFull, match=r"^shared memory is full: /dev/shm/.* lower queue.max_bytes, set queue.spill"
    ):
        SegmentFile(f"/dev/shm/distqueue-test-{os.getpid()}", huge)
    assert not os.path.exists(f"/dev/shm/distqueue-test-{os.getpid()}")


def test_a_shard_does_not_start_where_there_is_no_space_and_says_so():
    assert half_of(1 << 30, "/dev/shm/distqueue-1/shard") == 1 << 29
    with pytest.raises(StorageFull, match="shared memory is full: /dev/shm/distqueue-1/shard: 4,096 bytes are free"):
        half_of(4096, "/dev/shm/distqueue-1/shard")
    with pytest.raises(StorageFull, match="the disk is full: /runs/run/queue/segments/shard: 0 bytes are free"):
        half_of(0, "/runs/run/queue/segments/shard")


def _fill(folder: Path) -> None:
    """Leaves no free block."""
    with open(folder / "filler", "wb", buffering=0) as filler:
        with pytest.raises(OSError, match="No space left"):
            while True:
                filler.write(bytes(4096))


def test_a_shard_for_whose_lock_there_is_no_space_leaves_nothing(small: Path) -> None:
    _fill(small)
    with pytest.raises(StorageFull, match=rf"^the disk is full: {small}/distqueue-1/s: 4,096 bytes .*, 0 are free"):
        own(small / "distqueue-1" / "s")
    shard = Shard(str(small / "distqueue-1" / "s"), None)
    with pytest.raises(StorageFull, match=f"^the disk is full: {small}/distqueue-1"):
        shard.free_bytes()
    shard.end()
    assert os.listdir(small) == ["filler"]


def test_a_shard_that_is_restarted_needs_no_space_for_its_lock(small: Path) -> None:
    folder = small / "distqueue-1" / "s"
    os.close(own(folder))
    (folder / "segment").write_bytes(b"a")
    _fill(small)
    os.close(own(folder))
    assert (folder / "segment").read_bytes() == b"a"
    assert json.loads((small / "distqueue-1" / "s.lock").read_text())[2] == os.getppid()


def test_a_queue_whose_shard_has_no_space_names_it_and_leaves_nothing(small: Path) -> None:
    use_ray()
    _fill(small)
    with pytest.raises(StorageFull, match=rf"^the disk is full: {small}/distqueue-") as full:
        DistQueue.create(["train"], spill=str(small))
    name = str(full.value).split(f"{small}/")[1].split("/")[0]  # of the folders of this queue, also in shared memory
    assert os.listdir(small) == ["filler"] and not Path("/dev/shm", name).exists()


def test_all_clients_of_a_queue_whose_journal_has_no_space_are_told_the_file_and_the_bytes(small: Path) -> None:
    actor = QueueActor(name="", tasks=("train",), options=QueueOptions(journal=str(small / "queue")), node="here")
    actor.core = QueueCore(SampleTable(("train",), 60.0), max_rows=10, epoch="1")
    actor.fleet = Fleet(actor.core, actor.options, epoch="1", queue="", settle=actor._settle)
    answers: list[object] = []
    actor.core.ask(select(1), now_s=0.0, answer=answers.append)
    actor.journal = Journal(small / "queue", actor.core.snapshot)
    actor.journal.begin(actor.core.snapshot())
    _fill(small)
    full = (
        rf"^journal {small}/queue: the disk is full: {small}/queue/journal: [\d,]+ bytes were asked for, \d+ are free"
    )
    actor.journal.append("large", bytes(1 << 16))
    with pytest.raises(JournalFull, match=full):
        asyncio.run(actor._settle())
    with pytest.raises(JournalFull, match=full):
        actor.core.ack("train", [], 0.0)
    (answer,) = answers
    assert isinstance(answer, JournalFull) and re.match(full, str(answer))
    actor.core.close()  # as its client does, whose run has failed
    with pytest.raises(JournalFull, match=full):
        actor.core.seal(0.0)
    actor.journal.close()


def test_a_shard_whose_node_has_gone_is_named_with_the_reason_of_ray() -> None:
    class Gone(Fleet):
        async def add(self, node: str) -> str:
            raise ray.exceptions.ActorUnschedulableError(f"node {node} has gone\nand more")

    actor = QueueActor(name="", tasks=("train",), options=QueueOptions(), node="here")
    actor.core = QueueCore(SampleTable(("train",), 60.0), max_rows=10, epoch="1")
    actor.fleet = Gone(actor.core, actor.options, epoch="1", queue="", settle=actor._settle)
    with pytest.raises(QueueClosed, match="any node of the cluster: .*node a has gone$"):
        asyncio.run(actor._start_on(["a"]))
