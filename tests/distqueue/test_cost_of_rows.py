"""A token costs the queue as much in a long row as in a short one: in shared memory, spilled to a disk, and with a
journal. CPU of the client, the queue's actor and its shard together."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from benchmarks.growth import on_reference
from distqueue import DistQueue, PackedBatch
from tests.by_length import ROUNDS, assert_long_samples_cost_no_more
from tests.warm import use_ray

ROWS = 8
"""Of a put"""
MIN_TOKENS = 1 << 18
"""Of all rows that are measured at a time"""
COLUMNS = ("response", "behaviour_logprobs", "versions", "text")


@pytest.mark.extended
def test_a_token_costs_as_much_in_a_long_row(tmp_path):
    use_ray()
    assert_long_samples_cost_no_more(lambda num_tokens: costs_of(num_tokens, tmp_path / str(num_tokens)))


def costs_of(num_tokens: int, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield each cost of rows of so many tokens, by name."""
    times = max(2, MIN_TOKENS // (ROWS * num_tokens))
    tokens = times * ROWS * num_tokens
    queues = {
        "memory": DistQueue.create(["train"]),
        "journal": DistQueue.create(["train"], durability="journal", journal=str(folder / "journal")),
    }
    source = np.full(batch_of("one", num_tokens).nbytes, 7, np.uint8)
    target = np.zeros_like(source)
    floor_s = on_reference(lambda: cpu_of([], lambda: [np.copyto(target, source) for _ in range(times)]), ROUNDS)
    yield "floor_copy_us", floor_s / tokens * 1e6
    for kind, queue in queues.items():
        processes = processes_of(queue)
        works = {"put": partial(put, num_tokens=num_tokens), "claim": claim, "read": read, "ack": ack}
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for number in range(ROUNDS):
            names = [f"{number}-{one}" for one in range(times)]
            for name, work in works.items():
                measure = partial(cpu_of, processes, partial(work, queue, names))
                seconds[name].append(on_reference(measure, 1))
        for name, found in seconds.items():
            yield f"{kind}_{name}_us_a_token", min(found) / tokens * 1e6
    put(queues["journal"], [f"last-{number}" for number in range(times)], num_tokens)
    segments = sum(path.stat().st_size for path in (folder / "journal" / "segments").rglob("*") if path.is_file())
    yield "journal_bytes_a_token", segments / tokens
    write = partial(queues["journal"].checkpoint, str(folder / "checkpoint"))
    yield "checkpoint_us_a_token", cpu_of(processes_of(queues["journal"]), write) / tokens * 1e6
    yield "checkpoint_bytes_a_token", bytes_below(folder / "checkpoint") / tokens
    for queue in queues.values():
        queue.close()
    yield from costs_of_spilling(num_tokens, times, folder / "spill")


def costs_of_spilling(num_tokens: int, times: int, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the costs of puts of which each spills the one before, and the memory that the shard takes for that."""
    size, tokens = batch_of("one", num_tokens).nbytes, times * ROWS * num_tokens
    queue = DistQueue.create(["train"], max_bytes=max(1 << 16, size * 3 // 2), spill=str(folder))
    _, shard = processes = processes_of(queue)
    put(queue, ["first"], num_tokens)
    call = shard.__ray_call__.remote
    ray.get(call(lambda _: tracemalloc.start()))
    before = ray.get(call(lambda _: tracemalloc.get_traced_memory()[0]))
    seconds = cpu_of(processes, partial(put, queue, [f"later-{number}" for number in range(times)], num_tokens))
    peak = ray.get(call(lambda _: tracemalloc.get_traced_memory()[1]))
    yield "spilling_put_us_a_token", seconds / tokens * 1e6
    yield "spilling_memory_bytes_a_token", (peak - before) / ROWS / num_tokens
    yield "spilled_bytes_a_token", bytes_below(folder) / tokens
    queue.close()


def batch_of(name: str, num_tokens: int) -> PackedBatch:
    """Return rows as engines put them."""
    columns: dict[str, Any] = {
        "response": [torch.arange(num_tokens)] * ROWS,
        "behaviour_logprobs": [torch.full((num_tokens,), -0.5)] * ROWS,
        "versions": [torch.full((num_tokens,), 3, dtype=torch.int32)] * ROWS,
        "text": ["word" * num_tokens] * ROWS,
    }
    return PackedBatch.from_samples(ids_of(name), columns, [name] * ROWS, [(3, 3)] * ROWS)


def put(queue: DistQueue, names: Sequence[str], num_tokens: int) -> None:
    for name in names:
        queue.put(batch_of(name, num_tokens))


def claim(queue: DistQueue, names: Sequence[str]) -> None:
    """Add a column of advantages, and claim the rows, as an update does."""
    for name in names:
        queue.put(PackedBatch.from_samples(ids_of(name), {"advantages": torch.zeros(ROWS)}), claim="train")


def read(queue: DistQueue, names: Sequence[str], columns: Sequence[str] = (*COLUMNS, "advantages")) -> None:
    for name in names:
        assert len(queue.read(ids_of(name), columns)) == ROWS


def ack(queue: DistQueue, names: Sequence[str]) -> None:
    for name in names:
        queue.ack("train", ids_of(name))


def ids_of(name: str) -> list[str]:
    return [f"{name}-{row}" for row in range(ROWS)]


def processes_of(queue: DistQueue) -> list[Any]:
    """Return the queue's actor and its shard."""
    ((_, shard),) = queue._call("where").values()
    return [queue._actor, shard]


def cpu_of(processes: list[Any], work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call, in this process and in these."""

    def total_s() -> float:
        others = [one.__ray_call__.remote(lambda _: time.process_time()) for one in processes]
        return time.process_time() + sum(ray.get(others))

    began_s = total_s()
    work()
    return total_s() - began_s


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
