"""Measure events of the ledger and of the request buffer, and of a queue that holds many samples. CPU time."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

GROUP_SIZE, ENGINES, BATCH = 8, 64, 4096
"""Requests of a group; engines; samples of a put, a get and an ack"""


def measure_ledger(groups: int) -> float:
    """Return events per second: groups are admitted and finish, the ledger is asked after each whether a step may begin
    and what it waits for, and they are trained; two versions in progress."""
    from stalesync.policy.staleness import StalenessLedger

    ledger, names = StalenessLedger(1, groups), [f"e0-{k}" for k in range(2 * groups)]
    start_s = time.process_time()
    ledger.admit(names)
    for name in names:
        ledger.finish(name, 100)
        ledger.waits_for_older, ledger.is_enough, ledger.may_admit  # noqa: B018
    for _ in range(2):
        ledger.train(ledger.enough())
        ledger.advance()
    assert ledger.ended["trained"] == len(names)
    return 3 * len(names) / (time.process_time() - start_s)


def measure_buffer(groups: int) -> float:
    """Return events per second: requests are added, dispatched to engines, suspended and dispatched again, and finish;
    their groups are removed."""
    from fusion.rollout import EngineRoom, RequestBuffer, SuspendedSample

    buffer, engines = RequestBuffer(), tuple(range(ENGINES))
    names = [(f"e0-{g}", [f"e0-{g}/{k}" for k in range(GROUP_SIZE)]) for g in range(groups)]
    room = EngineRoom(-(-groups * GROUP_SIZE // ENGINES))
    start_s = time.process_time()
    for group, ids in names:
        buffer.add(group, ids, prompt_tokens=20, max_tokens=512)
    for _ in range(2):
        for engine, entries in buffer.dispatch(engines, room).items():
            for entry in entries:
                buffer.suspend(engine, SuspendedSample(entry.id, 9, "row", (0, 0), kv_rank=0))
    for entries in buffer.dispatch(engines, room).values():
        buffer.finish({entry.id: 100 for entry in entries})
    for group, _ in names:
        buffer.remove(group)
    assert not buffer.entries
    return 7 * groups * GROUP_SIZE / (time.process_time() - start_s)


def measure_queue(held: int) -> dict[str, float]:
    """Return samples per second of puts, gets and acks of further samples while ``held`` are in the queue, and the
    bytes of memory per sample. In a process of its own."""
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(_measure_queue, (held,))


def _measure_queue(held: int) -> dict[str, float]:
    import torch

    from distqueue import LocalQueue, PackedBatch

    tokens = [torch.arange(8, dtype=torch.int32)] * BATCH

    def batch(start: int, count: int) -> PackedBatch:
        ids = [f"e0-{start + k}/0" for k in range(count)]
        return PackedBatch.from_samples(ids, {"response": tokens[:count]}, ids, [(0, 0)] * count)

    queue = LocalQueue(["reward", "train"])
    queue.put(batch(0, 1))
    gc.collect()
    before = _resident_bytes()
    for start in range(1, held, BATCH):
        queue.put(batch(start, min(BATCH, held - start)))
    gc.collect()
    bytes_held = (_resident_bytes() - before) / held
    seconds = dict.fromkeys(("put", "get", "ack"), 0.0)
    rounds = 20
    for number in range(rounds):
        new = batch(held + number * BATCH, BATCH)
        seconds["put"] += _timed(lambda new=new: queue.put(new))  # type: ignore[misc]
        for task in ("reward", "train"):
            start_s = time.process_time()
            taken = queue.get(task, ["response"], BATCH, partial=True)
            seconds["get"] += time.process_time() - start_s
            seconds["ack"] += _timed(lambda task=task, ids=taken.ids: queue.ack(task, ids))  # type: ignore[misc]
    figures = {
        f"{name}_samples_per_s": (1 if name == "put" else 2) * rounds * BATCH / total for name, total in seconds.items()
    }
    return figures | {"bytes_per_sample": bytes_held}


def _timed(call: Callable[[], object]) -> float:
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
