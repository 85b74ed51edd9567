"""The queue across real processes: one Ray cluster for all tests of this file."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest
import ray
import torch

from distqueue import DistQueue, GetRequest, PackedBatch, QueueClosed
from distqueue.grants import MAX_GRANTS
from tests.machine import patience, wait_for
from tests.warm import use_ray


@pytest.fixture(scope="module", autouse=True)
def cluster() -> None:
    use_ray()


@ray.remote(num_cpus=0)
class Idle:
    async def answer(self) -> None:
        pass


def call_ratio(queue: DistQueue) -> float:
    """A call of the queue over one of an actor that has nothing to do: medians of calls in turn."""
    idle = Idle.remote()
    ray.get(idle.answer.remote())
    seconds: dict[str, list[float]] = {"queue": [], "idle": []}
    for _ in range(25):
        for name, call in (("queue", queue.stats), ("idle", lambda: ray.get(idle.answer.remote()))):
            began_s = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began_s)
    return statistics.median(seconds["queue"]) / statistics.median(seconds["idle"])


def test_samples_travel_between_processes_while_others_starve() -> None:
    queue = DistQueue.create(["reward", "train"], name="samples")

    @ray.remote(num_cpus=0)
    def write(queue: DistQueue) -> int:
        tokens = [torch.arange(200_000, dtype=torch.bfloat16), torch.arange(0, dtype=torch.bfloat16)]
        columns = {"tokens": tokens, "mask": torch.ones(2, 1, dtype=torch.bool), "answer": ["sieben", ""]}
        queue.put(PackedBatch.from_samples(["a", "b"], columns), groups=["g", "g"], versions=[3, (3, 4)])
        return os.getpid()

    @ray.remote(num_cpus=0)
    def starve() -> str:
        try:
            DistQueue.connect("samples").get("train", ["tokens", "reward"], 2)
        except QueueClosed as error:
            return str(error)
        return "served"

    starved = starve.remote()
    writer = write.remote(queue)
    batch = queue.get("reward", ["tokens", "mask", "answer"], 2, timeout_s=patience(60))
    assert ray.get(writer) != os.getpid()
    assert (batch.ids, batch.groups, batch.versions) == (("a", "b"), ("g", "g"), ((3, 3), (3, 4)))
    assert torch.equal(batch["tokens"][0], torch.arange(200_000, dtype=torch.bfloat16)) and len(batch["tokens"][1]) == 0
    assert batch["mask"].buffer.shape == (2, 1) and list(batch["answer"]) == ["sieben", ""]
    batch["tokens"].buffer.zero_()
    assert queue.read(["a"], ["tokens"])["tokens"][0][-1] != 0, "the reader owns what it got"

    wait_for(lambda: queue.stats()["distqueue/train/waiters"] > 0, 60)
    assert call_ratio(queue) < 20, "one that waits delays nobody"
    queue.ack("reward", batch.ids)
    queue.close()
    assert "closed" in ray.get(starved, timeout=patience(60))
    queue._actor = None  # it may answer for a moment: it is not asked
    with pytest.raises(QueueClosed):
        queue.stats()


def test_a_put_is_one_request_after_the_first_of_its_size_and_sizes_that_change_keep_few_files() -> None:
    queue = DistQueue.create(["train"])
    for k, (rows, requests) in enumerate([(40, 2), (40, 1), (44, 1), (400, 2), (40, 1), (400, 1), (4, 2)]):
        before = queue.traffic.requests
        ids = [f"{k}-{row}" for row in range(rows)]
        queue.put(PackedBatch.from_samples(ids, {"tokens": [torch.full((1000,), k)] * rows}))
        assert queue.traffic.requests - before == requests
        batch = queue.get("train", ["tokens"], rows)
        assert batch.ids == tuple(ids) and bool((batch["tokens"].buffer == k).all())
        queue.ack("train", batch.ids)
    queue.put(PackedBatch.from_samples(["a"], {"tokens": [torch.ones(1)[:0].long()]}))
    with pytest.raises(ValueError, match="sample 'a': column 'tokens' exists already"):
        queue.put(PackedBatch.from_samples(["a"], {"tokens": [torch.ones(1)[:0].long()]}))
    assert queue.put(PackedBatch.from_samples(["b"], {"tokens": [torch.ones(1)[:0].long()]})) == ()
    assert queue.state()["granted"] == MAX_GRANTS
    queue.close()


def test_errors_and_waiting_are_those_of_the_local_queue() -> None:
    queue = DistQueue.create(["train"], lease_s=0.5)
    queue.put(PackedBatch.from_samples(["a"], {"tokens": [torch.arange(3)]}))
    assert queue.lengths(["a"], ["tokens"]) == {"tokens": [3]}
    assert queue.holding("tokens") == ["a"] and queue.holding("reward") == []
    for requests in (2, 1):  # the first one asks where the shards are, too
        before = queue.traffic.requests
        assert queue.get("train", ["tokens"], 1, lengths=["tokens"]).lengths == {"tokens": [3]}
        assert queue.traffic.requests - before == requests
        queue.give_back("train", ["a"])
    with pytest.raises(ValueError, match="^sample 'b': never put$"):
        queue.put(PackedBatch(("a", "b"), {}), claim="train")
    with pytest.raises(ValueError, match="^sample 'a': column 'tokens' exists already$"):
        queue.put(PackedBatch.from_samples(["a"], {"tokens": [torch.arange(3)]}))
    with pytest.raises(TimeoutError, match="column 'reward' missing for 1"):
        queue.get("train", ["reward"], 1, timeout_s=0.05)
    with pytest.raises(ValueError, match="task 'trian'"):
        queue.get("trian", ["tokens"], 1)

    left: Future[None] = Future()
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(queue.fetch, GetRequest("train", ["reward"], count=1), left)
        wait_for(lambda: queue.stats()["distqueue/train/waiters"] == 1, 30)
        left.set_result(None)
        with pytest.raises(CancelledError):
            leaving.result(timeout=patience(30))
        served = pool.submit(queue.get, "train", ["reward"], 1, timeout_s=patience(30))
        queue.put(PackedBatch.from_samples(["a"], {"reward": torch.ones(1)}))
        assert served.result().ids == ("a",)
    time.sleep(0.6)
    queue.put(PackedBatch.from_samples(["a"], {"advantage": torch.ones(1)}), claim="train")  # the lease ran out
    assert queue.get("train", ["tokens"], 1, timeout_s=patience(30)).ids == ("a",), "so did that of the claim"
    queue.ack("train", ["a"])
    assert queue.stats()["distqueue/ended/done"] == 1
    queue.close()
    queue.close()


def test_an_ack_answers_with_the_figures_after_it_by_one_request() -> None:
    queue = DistQueue.create(["train"])
    queue.put(PackedBatch.from_samples(["a", "b"], {"tokens": [torch.arange(2), torch.arange(3)]}))
    queue.get("train", ["tokens"], 2)
    requests = queue.traffic.requests
    figures = queue.ack_with_stats("train", ["a"])
    assert queue.traffic.requests == requests + 1 and figures == queue.stats() | {
        name: value for name, value in figures.items() if name.endswith("age_s")
    }
    assert figures["distqueue/rows"] == 1 == figures["distqueue/ended/done"]
    with pytest.raises(ValueError, match="sample 'never'"):
        queue.ack_with_stats("train", ["never"])
    queue.close()


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="lease_s=0"):
        DistQueue.create(["train"], lease_s=0)
