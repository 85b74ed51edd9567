"""A batch that is read ahead is the one that would have been read, and is held no longer than for the next read."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distqueue import LocalQueue, PackedBatch, SamplesLost
from fusion.colocate.samples.reader import ReadAhead

IDS = ["a", "b", "c"]
BATCHES = st.lists(st.sampled_from(IDS), min_size=1, max_size=3, unique=True)


def queue_of(ids: list[str]) -> LocalQueue:
    queue = LocalQueue(["train"])
    queue.put(PackedBatch.from_samples(ids, {"x": torch.arange(len(ids)), "y": torch.arange(len(ids)) + 10}))
    return queue


class Counting:
    """A queue that counts its reads and names the thread of the last one."""

    def __init__(self, queue: LocalQueue):
        self.queue, self.reads, self.thread = queue, 0, ""

    def read(self, ids, columns):
        self.reads, self.thread = self.reads + 1, threading.current_thread().name
        return self.queue.read(ids, columns)


@given(st.lists(st.tuples(st.booleans(), BATCHES, st.sampled_from([("x",), ("x", "y")])), max_size=8))
def test_a_read_returns_what_the_queue_returns_whatever_was_begun(calls):
    queue = queue_of(IDS)
    ahead = ReadAhead(queue)
    for only_begun, ids, columns in calls:
        if only_begun:
            ahead.begin(ids, columns)
            continue
        batch, expected = ahead.read(ids, columns), queue.read(ids, columns)
        assert batch.ids == expected.ids and batch.columns.keys() == expected.columns.keys()
        assert all(batch[name].buffer.equal(expected[name].buffer) for name in columns)


def test_a_begun_batch_is_read_once_by_a_thread_and_delivered_once():
    counting = Counting(queue_of(IDS))
    ahead = ReadAhead(counting)
    ahead.begin(IDS, ["x"])
    ahead.read(IDS, ["x"])
    assert counting.reads == 1 and counting.thread.startswith("read ahead")
    ahead.read(IDS, ["x"])
    assert counting.reads == 2 and counting.thread == threading.current_thread().name


def test_an_error_is_raised_to_the_caller_that_asks_for_the_batch():
    queue = queue_of(IDS)
    queue.lose(["b"], "a test")
    ahead = ReadAhead(queue)
    ahead.begin(IDS, ["x"])
    with pytest.raises(SamplesLost, match="'b'"):
        ahead.read(IDS, ["x"])
    assert ahead.read(["a", "c"], ["x"])["x"].buffer.tolist() == [0, 2]
