"""A queue under fire: writers, readers, shard and actor are killed (SIGKILL) while samples pass, and claims checked.

What a process knows stands in a file of its own, written between the queue's answer and its next step: ids that were
put, that a task got (before it acknowledges them), that it has acknowledged. The payload of a sample follows from its
id. So a process can be killed at any moment, and still:

* a sample whose put was answered is got by every task;
* a sample whose ack was answered is not handed out to that task by any get that was asked after that;
* what is handed out is bitwise what its id says, and nothing is left in the queue at the end.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from distqueue import DistQueue, PackedBatch, QueueClosed, QueueDrained
from tests.machine import Deadline, patience, running, wait_for
from tests.warm import use_ray

TASKS = ("reward", "train")
LEASE_S = 3.0
NAME = "under-fire"


def make_batch(ids: list[str]) -> PackedBatch:
    """Small samples of three layouts, all of whose bits follow from their ids."""
    tokens, scores, texts = [], [], []
    for id in ids:
        seed = np.frombuffer(hashlib.sha256(id.encode()).digest(), np.uint8)
        tokens.append(torch.from_numpy(np.resize(seed, int(seed[0]) * 3).astype(np.int64)))
        scores.append(float(seed[1]))
        texts.append(id * int(seed[2] % 4))
    return PackedBatch.from_samples(ids, {"tokens": tokens, "score": torch.tensor(scores), "text": texts})


def same(got: PackedBatch) -> bool:
    wanted = make_batch(list(got.ids))
    return all(
        torch.equal(got[name].buffer, column.buffer) and torch.equal(got[name].lengths(), column.lengths())
        for name, column in wanted.columns.items()
    )


class Party:
    """Runs inside Ray and is started anew when it was killed. `told`: the folder of what was done."""

    def __init__(self, told: str, name: str) -> None:
        self.told, self.name = Path(told), f"{name}-{os.getpid()}-{time.time_ns()}"

    def write(self, until_s: float, size: int) -> None:
        queue, rng, n = DistQueue.connect(NAME), random.Random(self.name), 0
        while time.time() < until_s:
            ids = [f"{self.name}:{n + k}" for k in range(rng.randint(1, size))]
            n += len(ids)
            queue.put(make_batch(ids))
            self._tell("put", ids)

    def read(self, task: str, size: int) -> None:
        """Until the queue is drained."""
        queue, rng = DistQueue.connect(NAME), random.Random(self.name)
        while True:
            acknowledged = told(self.told, f"acked-{task}")
            try:
                batch = queue.get(task, ["tokens", "score", "text"], rng.randint(1, size), timeout_s=patience(60))
            except QueueDrained:
                return
            again = acknowledged & set(batch.ids)
            if again or not same(batch):
                self._tell("wrong", [f"{task}: again {sorted(again)}" if again else f"{task}: payload {batch.ids}"])
            self._tell(f"got-{task}", list(batch.ids))
            if rng.random() < 0.1:
                continue  # forgets them: they come again when the lease ends
            queue.ack(task, batch.ids)
            self._tell(f"acked-{task}", list(batch.ids))

    def _tell(self, what: str, lines: list[str]) -> None:
        handle = os.open(self.told / f"{what}.{self.name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, "".join(line + "\n" for line in lines).encode())
        os.close(handle)


def told(folder: Path, what: str) -> set[str]:
    """Whole lines only: the last may have been cut off."""
    return {line for path in folder.glob(f"{what}.*") for line in path.read_text().split("\n")[:-1]}


@contextmanager
def cluster() -> Iterator[None]:
    ray.shutdown()
    use_ray()
    try:
        yield
    finally:
        ray.shutdown()


def pid_of(actor: Any) -> int | None:
    """None while it is being started anew."""
    try:
        return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=patience(1))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


def fire(journal: Path, folder: Path, seconds: float, pause_s: tuple[float, float], seed: int) -> int:
    """Passes samples for `seconds` while somebody is killed every `pause_s`; at the end everything is killed at once.
    Returns how many were killed; what was told is in `folder`."""
    folder.mkdir(exist_ok=True)
    rng, killed = random.Random(seed), 0
    with cluster():
        queue = _create(journal)
        writers, readers = _parties(folder, seed)
        until_s = time.time() + seconds
        jobs = [(writer, "write", (until_s, 6)) for writer in writers]
        jobs += [(reader, "read", (task, 9)) for task, reader in readers]
        running = {getattr(actor, job).remote(*args): (actor, job, args) for actor, job, args in jobs}
        while time.time() < until_s:
            time.sleep(rng.uniform(*pause_s))
            shards = [actor for _, actor in queue._call("where").values()]
            everybody = [queue._actor, *shards, *writers, *(reader for _, reader in readers)]
            killed += _kill_one(rng, everybody)
            running = _go_on(running)
        return killed + _kill_all(everybody)


def drain(journal: Path, folder: Path, seed: int) -> dict[str, float]:
    """Goes on, with everything new, from what was left, to the end; returns the queue's last stats."""
    with cluster():
        queue = _create(journal)
        _, readers = _parties(folder, seed)
        running = {r.read.remote(task, 9): (r, "read", (task, 9)) for task, r in readers}
        _drain(queue, running)
        stats = queue.stats()
        queue.close()
    return stats


def check(folder: Path, stats: dict[str, float]) -> int:
    """Every claim; returns how many samples passed."""
    assert not told(folder, "wrong"), sorted(told(folder, "wrong"))[:5]
    put = told(folder, "put")
    for task in TASKS:
        assert not put - told(folder, f"got-{task}"), (
            f"{task} never got {sorted(put - told(folder, f'got-{task}'))[:5]}"
        )
    assert stats["distqueue/rows"] == stats["distqueue/bytes"] == 0
    assert stats["distqueue/ended/done"] >= len(put)
    assert {name for name in stats if name.startswith("distqueue/ended/")} == {"distqueue/ended/done"}
    return len(put)


def _create(journal: Path) -> DistQueue:
    return DistQueue.create(TASKS, durability="journal", journal=str(journal), lease_s=LEASE_S, name=NAME)


def _parties(folder: Path, seed: int) -> tuple[list[Any], list[tuple[str, Any]]]:
    # two threads: one answers who it is while the other works
    party = ray.remote(Party).options(num_cpus=0, max_restarts=-1, max_concurrency=2)
    writers = [party.remote(str(folder), f"w{seed}{k}") for k in range(2)]
    readers = [(task, party.remote(str(folder), f"r{seed}{task}")) for task in TASKS]
    ray.get([actor.__ray_ready__.remote() for actor in [*writers, *(reader for _, reader in readers)]])
    return writers, readers


def kill(*actors: Any) -> None:
    """Kills the processes of actors that Ray restarts. They have ended when this returns: `ray.kill` returns before, so
    an old process may still answer."""
    pids = [pid for actor in actors if (pid := pid_of(actor))]
    assert len(pids) == len(actors), "not all are alive"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(running, pids)), 30)


def _kill_one(rng: random.Random, everybody: list[Any]) -> int:
    pid = pid_of(rng.choice(everybody))
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return pid is not None


def _kill_all(everybody: list[Any]) -> int:
    pids = [pid for actor in everybody if (pid := pid_of(actor))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def _go_on(running: dict[Any, tuple[Any, str, tuple]]) -> dict[Any, tuple[Any, str, tuple]]:
    """Whoever was killed does its job again, once it has been started anew."""
    done, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
    for ref in done:
        actor, job, args = running.pop(ref)
        try:
            ray.get(ref)
        except (ray.exceptions.RayActorError, QueueClosed):
            running[getattr(actor, job).remote(*args)] = actor, job, args
    return running


def _drain(queue: DistQueue, running: dict[Any, tuple[Any, str, tuple]]) -> None:
    """Writers are done, then readers get the rest."""
    deadline = Deadline(120)
    while any(job == "write" for _, job, _ in running.values()) and not deadline.expired():
        time.sleep(0.2)
        running = _go_on(running)
    queue.seal()
    while running:
        assert not deadline.expired(), f"not drained: {queue.state()}"
        time.sleep(0.2)
        running = _go_on(running)
