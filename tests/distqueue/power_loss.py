"""A queue whose machine loses its power at any moment: what was acknowledged is there, and nothing is there by halves.

    python -m tests.distqueue.power_loss FOLDER ROUNDS SEED        with power.c preloaded

One round: a forked process runs the queue's actor, without Ray, on FOLDER/disk, puts and acknowledges, and tells
through a pipe what it begins and what it was answered. It is killed; of the disk is kept what power.c saw synced and,
by lot, other content that had been written; the parent checks every claim on that, and the next round goes on from it.

* A sample whose put was answered is there, bitwise, in every column.
* An ack that was answered is not undone.
* Of a put that was begun and not answered either all samples are there or none.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distqueue import PackedBatch, QueueOptions, journal
from distqueue.actor import PlaceInLine, QueueActor
from distqueue.core import QueueCore
from distqueue.fleet import ShardHandle
from distqueue.messages import Delivery, Put
from distqueue.payload.buffers import BufferPool
from distqueue.payload.columns import gather_columns, stretches_of
from distqueue.payload.segment_file import SegmentFile, lay_out
from distqueue.payload.shard import Shard
from distqueue.samples import SampleTable, Selection
from distqueue.segments import ShardState
from tests.distqueue.faults import TASKS, make_batch

COLUMNS = "tokens", "score", "text"
LEASE_S = 1000.0
HERE = "here"


class Direct:
    """A shard of this process, called as Ray's are."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._shard, name)

        class Method:
            @staticmethod
            def remote(*arguments: Any) -> asyncio.Future[Any]:
                answer = asyncio.get_running_loop().create_future()
                answer.set_result(method(*arguments))
                return answer

        return Method


class PlainActor(QueueActor):
    """The queue's actor with one shard, and no Ray."""

    def __init__(self, folder: Path) -> None:
        options = QueueOptions(durability="journal", journal=str(folder), lease_s=LEASE_S)
        super().__init__(name="", tasks=TASKS, options=options, node=HERE)

    async def _start_shards(self) -> None:
        folder = str(Path(str(self.options.journal)) / "segments" / HERE)
        self.fleet.shards[HERE] = ShardHandle(HERE, Direct(Shard(folder, None)))
        self.core.ledger.add_shard(ShardState(HERE, node=HERE, folder=folder, max_bytes=1 << 40, recycles=False))


# ---- the process that is killed


class Party:
    """Writers and readers of one life of the queue."""

    def __init__(self, folder: Path, told: int, life: str) -> None:
        self.actor, self.told, self.rng, self.life = PlainActor(folder), told, random.Random(life), life

    async def live(self) -> None:
        await self.actor.start()
        self.tell("alive")
        await asyncio.gather(*(self.write(k) for k in range(3)), *(self.read(task) for task in TASKS))

    async def write(self, k: int) -> None:
        """Puts some samples with all their columns, some in two puts."""
        n = 0
        while True:
            n += 1
            ids = [f"{self.life}-{k}-{n}:{i}" for i in range(self.rng.randint(1, 5))]
            batch = make_batch(ids)
            for columns in [COLUMNS] if self.rng.random() < 0.5 else [COLUMNS[:1], COLUMNS[1:]]:
                await self.put(batch.select(columns=columns))

    async def put(self, batch: PackedBatch) -> None:
        what = " ".join([",".join(batch.columns), *batch.ids])
        self.tell("puts " + what)
        await put(self.actor, batch)
        self.tell("put " + what)

    async def read(self, task: str) -> None:
        while True:
            selection = Selection(task, COLUMNS, self.rng.randint(1, 8))
            found = await self.actor.get(selection=selection, wait_s=1.0, turn=None)
            if isinstance(found, PlaceInLine):
                continue
            ids = Delivery.from_bytes(found).ids
            await asyncio.sleep(self.rng.choice([0, 0.01]))
            self.tell(" ".join(["acks", task, *ids]))
            await self.actor.change("ack", task, ids)
            self.tell(" ".join(["ack", task, *ids]))

    def tell(self, line: str) -> None:
        os.write(self.told, (line + "\n").encode())


async def put(actor: QueueActor, batch: PackedBatch) -> None:
    """As a client does."""
    contents = lay_out(stretches_of(batch))
    reserved = await actor.reserve(message=Put.of(batch).to_bytes(), node=HERE, nbytes=contents.nbytes, number=None)
    assert not isinstance(reserved, PlaceInLine)
    assert reserved.durable
    await asyncio.to_thread(_write, reserved.number, reserved.path, reserved.size, contents)
    await actor.commit(number=reserved.number, path=reserved.path, node=HERE, nbytes=contents.nbytes, message=None)


def _write(number: int, path: str, size: int, contents: Any) -> None:
    file = SegmentFile(path, size)
    file.write(number, contents)
    file.sync()


def fork_party(folder: Path, life: str) -> tuple[int, int]:
    """(process, where it tells what it does)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.close(reading)
        os.environ |= {"POWER_LOSS_DIR": str(folder / "disk"), "POWER_LOSS_SHADOW": str(folder / "shadow")}
        journal.MIN_COMPACTED_BYTES = 1 << 13  # snapshots too, in so short a life
        asyncio.run(Party(folder / "disk" / "run" / "queue", writing, life).live())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


# ---- the power


def lose_power(folder: Path, rng: random.Random) -> None:
    """Puts in the place of the disk what was left of it: what was synced or, by lot, what had been written besides."""
    disk, left, lucky = folder / "disk", folder / "left", rng.random() < 0.5
    _rebuild(disk.stat().st_ino, left, folder / "shadow", dict(_by_inode(disk)) if lucky else {}, rng)
    shutil.rmtree(disk)
    left.rename(disk)


def _rebuild(inode: int, target: Path, shadow: Path, written: dict[int, Path], rng: random.Random) -> None:
    target.mkdir()
    names = shadow / "names" / str(inode)
    for line in names.read_text().splitlines() if names.exists() else ():
        number, name = line.split(" ", 1)
        content = shadow / "contents" / number
        if int(number) in written and rng.random() < 0.5:
            content = written[int(number)]
        if name.endswith("/"):
            _rebuild(int(number), target / name, shadow, written, rng)
        elif content.exists():
            shutil.copyfile(content, target / name)
        else:
            (target / name).touch()


def _by_inode(folder: Path) -> Iterator[tuple[int, Path]]:
    return ((path.stat().st_ino, path) for path in folder.rglob("*") if path.is_file())


def power_on(folder: Path) -> None:
    """What is on the disk is durable."""
    shadow = folder / "shadow"
    shutil.rmtree(shadow, ignore_errors=True)
    for kind in ("names", "contents", "gone"):
        (shadow / kind).mkdir(parents=True)
    (folder / "disk").mkdir(exist_ok=True)
    for path in (folder / "disk", *(folder / "disk").rglob("*")):
        if path.is_dir():
            lines = [f"{entry.inode()} {entry.name}{'/' * entry.is_dir()}\n" for entry in os.scandir(path)]
            (shadow / "names" / str(path.stat().st_ino)).write_text("".join(lines))
        else:
            shutil.copyfile(path, shadow / "contents" / str(path.stat().st_ino))


# ---- the claims


class Claims:
    """What was told in all rounds."""

    def __init__(self) -> None:
        self.begun: dict[tuple[str, ...], set[str]] = {}
        """Columns of puts that were begun, by the batch's ids, as long as one of them lives"""
        self.put: dict[str, set[str]] = {}
        """Columns that were put, by id, as long as it lives"""
        self.passed = 0
        """Samples that were put, and have ended since"""
        self.acking: dict[str, set[str]] = {task: set() for task in TASKS}
        self.acked: dict[str, set[str]] = {task: set() for task in TASKS}

    @property
    def num_acked(self) -> int:
        """Of the task that has acknowledged least."""
        return min(len(ids) for ids in self.acked.values())

    def are_many(self, rounds: int) -> bool:
        return self.passed > rounds and self.num_acked > rounds

    def hear(self, text: str) -> None:
        for what, *words in (line.split(" ") for line in text.split("\n")[:-1]):
            match what:
                case "puts":
                    self.begun.setdefault(tuple(words[1:]), set()).update(words[0].split(","))
                case "put":
                    for id in words[1:]:
                        self.put.setdefault(id, set()).update(words[0].split(","))
                case "acks":
                    self.acking[words[0]].update(words[1:])
                case "ack":
                    self.acked[words[0]].update(words[1:])

    def check(self, folder: Path) -> None:
        core = recovered(folder)
        for ids, columns in list(self.begun.items()):
            ended = [id for id in ids if not core.table.are_live([id])[0] and has_ended(core, id)]
            assert all(id in self.acking[task] for id in ended for task in TASKS), "ended and not acknowledged"
            live = [id for id in ids if core.table.are_live([id])[0]]
            assert len(live) + len(ended) in (0, len(ids)), f"{ids} is there by halves: {live}, ended {ended}"
            for column in columns & set(COLUMNS) if live else ():
                holders = [id for id in live if holds(core, id, column)]
                assert holders in ([], live), f"column {column} of {ids} is there by halves"
                check_bits(core, holders, column)
            for id in live:
                missing = [column for column in self.put.get(id, ()) if not holds(core, id, column)]
                assert not missing, f"{id} was put and lacks {missing}"
            if not live:  # and never will be
                del self.begun[ids]
        lost = [id for id in self.put if not core.table.are_live([id])[0] and not has_ended(core, id)]
        assert not lost, f"{len(lost)} samples were put and are not there: {lost[:3]}"
        for task in TASKS:
            taken = core.table.take(Selection(task, COLUMNS[:1], partial=True), 0.0)
            undone = self.acked[task] & set(taken.ids if taken else ())
            assert not undone, f"acks of {task} are undone: {sorted(undone)[:3]}"
        self.passed += len(self.put)
        self.put = {id: columns for id, columns in self.put.items() if core.table.are_live([id])[0]}
        self.passed -= len(self.put)


def recovered(folder: Path) -> QueueCore:
    """What a new life of the queue would go on with."""
    found = journal.Journal(folder, lambda: b"")
    try:
        stored = found.read()
        assert not stored.missing, stored.damage
        if stored.snapshot is None:
            return QueueCore(SampleTable(TASKS, LEASE_S))
        return QueueCore.recover(stored.snapshot, stored.events, LEASE_S)
    finally:
        found.close()


def has_ended(core: QueueCore, id: str) -> bool:
    try:
        core.table.renew(TASKS[0], [id], 0.0)
    except ValueError:
        return False
    return True


def holds(core: QueueCore, id: str, column: str) -> bool:
    try:
        core.table.find([id], [column])
    except ValueError:
        return False
    return True


def check_bits(core: QueueCore, ids: list[str], column: str) -> None:
    if ids:
        found = core.locate(ids, [column])
        sources = [SegmentFile(place.path).columns(place.number) for place in found.places]
        got, wanted = gather_columns(found.parts, sources, BufferPool())[column], make_batch(ids)[column]
        assert got.buffer.equal(wanted.buffer) and got.lengths().equal(wanted.lengths()), f"{column} of {ids}"


def main(folder: Path, rounds: int, seed: int) -> None:
    """Lose power so often; more often where other work on the machine leaves a life little to do."""
    rng, claims = random.Random(seed), Claims()
    for life in range(5 * rounds):
        if life >= rounds and claims.are_many(rounds):
            break
        power_on(folder)
        pid, told = fork_party(folder, f"{seed}.{life}")
        time.sleep(rng.uniform(0.02, 0.3))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "it ended by itself"
        with open(told) as pipe:
            claims.hear(pipe.read())
        lose_power(folder, rng)
        claims.check(folder / "disk" / "run" / "queue")
    print(f"{life} losses of power, {claims.passed + len(claims.put)} samples put, {claims.num_acked} acknowledged")
    assert claims.are_many(rounds), "it hardly did anything"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
