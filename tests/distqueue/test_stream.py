"""Batches one after the other: every sample once, acknowledged when the next is asked for, given back otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from distqueue import GetRequest, LocalQueue, PackedBatch, QueueClosed, QueueDataset, stream
from tests.machine import patience, wait_for


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "stream" and t not in before], 5)


def filled(count: int, **options: Any) -> LocalQueue:
    queue = LocalQueue(["train"], **options)
    put(queue, 0, count)
    return queue


def put(queue: LocalQueue, first: int, stop: int) -> None:
    ids = [f"s{n}" for n in range(first, stop)]
    queue.put(PackedBatch.from_samples(ids, {"tokens": [torch.full((n % 5,), n) for n in range(first, stop)]}))


def figures(queue: LocalQueue, *names: str) -> list[float]:
    return [queue.stats()[f"distqueue/{name}"] for name in names]


def wait_until(queue: LocalQueue, name: str, value: float) -> None:
    wait_for(lambda: figures(queue, name) == [value], 10)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_all_samples_come_once_in_order_until_the_queue_is_drained(ahead: int) -> None:
    queue = filled(10)
    queue.seal()
    batches = list(stream(queue, "train", ["tokens"], ahead=ahead, count=4))
    assert [id for batch in batches for id in batch.ids] == [f"s{n}" for n in range(10)]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert all(bool((b["tokens"][k] == int(id[1:])).all()) for b in batches for k, id in enumerate(b.ids))
    assert figures(queue, "rows", "ended/done") == [0, 10]


def test_a_batch_is_acknowledged_when_the_next_is_asked_for() -> None:
    queue = filled(6)
    batches = stream(queue, "train", ["tokens"], ahead=0, count=2)
    first = next(batches)
    assert figures(queue, "rows", "train/leased") == [6, 2]
    second = next(batches)
    assert (first.ids, second.ids) == (("s0", "s1"), ("s2", "s3"))
    assert figures(queue, "rows", "train/leased", "ended/done") == [4, 2, 2]
    batches.close()


def test_the_next_batches_are_fetched_meanwhile_and_what_comes_later_too() -> None:
    queue = filled(4)
    batches = stream(queue, "train", ["tokens"], ahead=2, count=2)
    assert next(batches).ids == ("s0", "s1")
    wait_until(queue, "train/leased", 4)
    wait_until(queue, "train/waiters", 1)
    put(queue, 4, 6)
    wait_until(queue, "train/leased", 6)
    assert [next(batches).ids, next(batches).ids] == [("s2", "s3"), ("s4", "s5")]
    batches.close()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_loop_that_is_left_early_gives_its_batches_back_at_once(ahead: int) -> None:
    queue = filled(5)
    for batch in stream(queue, "train", ["tokens"], ahead=ahead, count=1):
        if batch.ids == ("s1",):
            break
    del batch
    assert figures(queue, "train/leased", "train/depth", "train/waiters", "ended/done") == [0, 4, 0, 1]
    assert queue.get("train", ["tokens"], 4).ids == ("s1", "s2", "s3", "s4")


def test_an_exception_in_the_loop_gives_its_batches_back() -> None:
    queue = filled(4)
    with pytest.raises(ZeroDivisionError):
        for _ in stream(queue, "train", ["tokens"], count=1):
            1 / 0  # noqa: B018
    wait_until(queue, "train/depth", 4)


class Reluctant:
    """A queue whose gets are over before their callers hear of it."""

    def __init__(self, queue: LocalQueue) -> None:
        self.queue, self.over = queue, threading.Event()
        self.ack, self.give_back = queue.ack, queue.give_back

    def fetch(self, request: GetRequest, left: Future[None]) -> PackedBatch:
        batch = self.queue.fetch(request, left)
        if batch.ids != ("s0",):
            self.over.set()
            time.sleep(0.2)
        return batch


def test_a_batch_that_arrives_as_the_loop_is_left_is_given_back() -> None:
    queue = Reluctant(filled(2))
    batches = stream(queue, "train", ["tokens"], count=1)
    assert next(batches).ids == ("s0",)
    assert queue.over.wait(patience(5))
    batches.close()
    assert figures(queue.queue, "train/depth", "train/leased") == [2, 0]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_queue_that_is_closed_ends_the_loop_by_name(ahead: int) -> None:
    queue = filled(2)
    batches = stream(queue, "train", ["tokens"], ahead=ahead, count=1)
    next(batches)
    queue.close()
    with pytest.raises(QueueClosed, match="the queue is closed"):
        next(batches)


def test_a_loop_that_waits_hears_that_the_queue_is_closed() -> None:
    queue = filled(1)
    batches = stream(queue, "train", ["tokens"], count=2)
    closing = threading.Timer(0.1, queue.close)
    closing.start()
    with pytest.raises(QueueClosed, match=r"task 'train' cannot get \['tokens'\]"):
        next(batches)
    closing.join()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_exceptions_of_get_reach_the_loop(ahead: int) -> None:
    queue = filled(1)
    with pytest.raises(ValueError, match="task 'trian'"):
        next(stream(queue, "trian", ["tokens"], ahead=ahead, count=1))
    with pytest.raises(TimeoutError, match="requests 2 samples with .* 1 samples ready"):
        next(stream(queue, "train", ["tokens"], ahead=ahead, count=2, timeout_s=0.05))
    assert figures(queue, "train/depth", "train/waiters") == [1, 0]


def test_a_torch_data_loader_takes_it() -> None:
    queue = filled(10)
    queue.seal()
    dataset = QueueDataset(queue, "train", ["tokens"], count=3)
    ids: list[str] = []
    for batch in DataLoader(dataset, batch_size=None, num_workers=0):
        assert isinstance(batch, PackedBatch) and len(batch) <= 3
        ids += batch.ids
    assert ids == [f"s{n}" for n in range(10)]
    assert figures(queue, "rows", "ended/done") == [0, 10]


def test_a_data_loader_that_is_left_early_gives_back_and_can_be_started_again() -> None:
    queue = filled(6)
    loader = DataLoader(QueueDataset(queue, "train", ["tokens"], count=2), batch_size=None, num_workers=0)
    batches = iter(loader)
    assert next(batches).ids == ("s0", "s1")
    del batches
    wait_until(queue, "train/depth", 6)
    queue.seal()
    assert [batch.ids[0] for batch in loader] == ["s0", "s2", "s4"]
