"""The queue in one process: waiting, leases, exactly-once delivery, and clients that do not disturb each other."""

from __future__ import annotations

import pickle
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest
import torch

from distqueue import GetRequest, LocalQueue, LostSample, PackedBatch, QueueClosed, SamplesLost
from tests.machine import cpu_within, patience, wait_for, within


def batch_of(*ids: str, length: int = 3) -> PackedBatch:
    return PackedBatch.from_samples(ids, {"tokens": [torch.full((length,), hash(id) % 1000) for id in ids]})


def wait_for_waiters(queue: LocalQueue, task: str, count: int) -> None:
    wait_for(lambda: queue.stats()[f"distqueue/{task}/waiters"] == count, 10)


def test_a_sample_passes_through_its_stages_and_is_freed() -> None:
    queue = LocalQueue(["reward", "train"])
    queue.put(batch_of("a", "b"), groups=["g", "g"], versions=[1, (1, 2)])
    got = queue.get("reward", ["tokens"], 2)
    assert (got.ids, got.groups, got.versions) == (("a", "b"), ("g", "g"), ((1, 1), (1, 2)))
    queue.put(PackedBatch.from_samples(["b", "a"], {"reward": torch.tensor([2.0, 1.0])}))
    queue.ack("reward", got.ids)
    got = queue.get("train", ["tokens", "reward"], 2)
    assert got["reward"].buffer.tolist() == [1.0, 2.0], "gathered in the order of the rows"
    stats = queue.stats()
    assert (stats["distqueue/rows"], stats["distqueue/train/leased"], stats["distqueue/reward/depth"]) == (2, 2, 0)
    assert stats["distqueue/bytes"] == 2 * 3 * 8 + 3 * 8 + 2 * 4 and stats["distqueue/train/age_s"] > 0
    queue.ack("train", got.ids)
    stats = queue.stats()
    assert (stats["distqueue/rows"], stats["distqueue/bytes"], stats["distqueue/ended/done"]) == (0, 0, 2)


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_setting_the_clock_of_the_machine_ends_no_lease_and_keeps_none(monkeypatch, jump_s) -> None:
    queue = LocalQueue(["train"], lease_s=60)
    queue.put(batch_of("a"))
    assert queue.get("train", ["tokens"], 1).ids == ("a",)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    with pytest.raises(TimeoutError):
        queue.get("train", ["tokens"], 1, timeout_s=0.05)
    assert queue.stats()["distqueue/train/leased"] == 1 and 0 <= queue.stats()["distqueue/train/age_s"] < patience(60)
    queue.close()


def test_a_writer_claims_the_samples_it_works_on_and_learns_their_lengths_without_reading() -> None:
    queue = LocalQueue(["reward", "train"], lease_s=30)
    queue.put(PackedBatch.from_samples(["a", "b"], {"tokens": [torch.ones(3), torch.ones(5)], "answer": ["x", "yy"]}))
    assert queue.lengths(["b", "a"], ["tokens", "answer"]) == {"tokens": [5, 3], "answer": [1, 1]}
    advantage = PackedBatch.from_samples(["b"], {"advantage": torch.ones(1)})
    queue.put(advantage, claim="train")
    assert queue.get("train", ["tokens"], 1).ids == ("a",), "what is claimed is handed to nobody else"
    other = PackedBatch.from_samples(["b"], {"other": torch.ones(1)})
    with pytest.raises(ValueError, match="sample 'b': task 'train' has leased it already"):
        queue.put(other, claim="train")
    with pytest.raises(ValueError, match="sample 'b': column 'advantage' exists already"):
        queue.put(advantage, claim="reward")
    queue.ack("train", ["b"])
    with pytest.raises(ValueError, match="sample 'b': task 'train' has acknowledged it already"):
        queue.put(other, claim="train")
    assert not queue.holding("other"), "nothing is stored if nothing is claimed, and the other way round"
    assert queue.get("reward", ["tokens"], 2).ids == ("a", "b"), "a claim is one task's"


def test_the_samples_that_hold_a_column_are_listed_while_they_live() -> None:
    queue = LocalQueue(["train"])
    assert queue.holding("tokens") == []
    queue.put(batch_of("b"))
    queue.put(batch_of("a", "c"))
    queue.put(PackedBatch.from_samples(["a", "b"], {"reward": torch.ones(2)}))
    queue.drop(["b"], "filtered")
    assert (queue.holding("tokens"), queue.holding("reward"), queue.holding("text")) == (["a", "c"], ["a"], [])


def test_a_reader_receives_the_lengths_of_columns_that_it_does_not_read() -> None:
    queue = LocalQueue(["reward"])
    queue.put(PackedBatch.from_samples(["a", "b"], {"tokens": [torch.ones(3), torch.ones(5)], "answer": ["x", "yy"]}))
    batch = queue.get("reward", ["answer"], lengths=["tokens", "answer"], count=2)
    assert batch.lengths == {"tokens": [3, 5], "answer": [1, 1]} and batch.columns.keys() == {"answer"}
    assert batch.select([1]).lengths == {"tokens": [5], "answer": [1]}
    assert batch.select([1, 0]).lengths["tokens"] == [5, 3]
    queue.put(PackedBatch.from_samples(["c"], {"answer": ["z"]}))
    with pytest.raises(TimeoutError, match="column 'tokens' missing for 1"):
        queue.get("reward", ["answer"], 1, lengths=["tokens"], timeout_s=0.01)


def test_readers_own_what_they_get() -> None:
    queue = LocalQueue(["train"])
    queue.put(batch_of("a"))
    queue.get("train", ["tokens"], 1)["tokens"].buffer.zero_()
    assert queue.read(["a"], ["tokens"])["tokens"][0].tolist() == [hash("a") % 1000] * 3


def test_a_refused_put_changes_nothing() -> None:
    queue = LocalQueue(["train"])
    queue.put(batch_of("a"))
    before = queue.stats() | {"distqueue/train/age_s": 0}
    with pytest.raises(ValueError, match="sample 'a': column 'tokens' exists already"):
        queue.put(batch_of("b", "a"))
    with pytest.raises(ValueError, match="column 'tokens': put as ColumnLayout.*this queue holds it as ColumnLayout"):
        queue.put(PackedBatch.from_samples(["c"], {"tokens": torch.ones(1)}))
    with pytest.raises(ValueError, match="sample 'a' lacks column 'reward'"):
        queue.read(["a"], ["reward"])
    assert queue.stats() | {"distqueue/train/age_s": 0} == before


BAD = {
    "an id that is no str": lambda: PackedBatch((1,), batch_of("a").columns),
    "a group that is no str": lambda: batch_of("a").labelled([None]),  # type: ignore[list-item]
    "a column that is no str": lambda: PackedBatch.from_samples(["a"], {7: torch.ones(1)}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_names_that_are_no_text_are_refused(bad: Callable[[], PackedBatch]) -> None:
    with pytest.raises(ValueError, match="(id 1|group None|column 7): (int|NoneType); expected a str"):
        bad()


@pytest.mark.parametrize("where", ["ids", "groups"])
def test_a_put_that_fails_in_any_way_fails_alone(where: str) -> None:
    """Whatever got past the checks: its writer is told, and it holds no room."""
    queue = LocalQueue(["train"], max_rows=1)
    bad = batch_of("a").labelled(["g"])
    object.__setattr__(bad, where, {"ids": (1,), "groups": ([],)}[where])
    with pytest.raises((TypeError, AttributeError, KeyError)):
        queue._put(bad)
    with ThreadPoolExecutor() as pool:
        good = pool.submit(queue.put, batch_of("b"))
        assert queue.get("train", ["tokens"], 1, timeout_s=patience(10)).ids == ("b",)
        assert good.result() == ()
    state = queue.state()
    assert (state["writing"], state["waiting_writers"], state["stats"]["distqueue/rows"]) == (0, [], 1)


def test_a_get_that_fails_in_any_way_fails_alone() -> None:
    queue = LocalQueue(["train"])
    queue.put(batch_of("a"), versions=[1])
    with pytest.raises(TypeError):
        queue.get("train", ["tokens", 1], 1, timeout_s=0)  # type: ignore[list-item]
    queue.put(batch_of("b"), versions=[1])
    assert queue.get("train", ["tokens"], 2, timeout_s=0).ids == ("a", "b")


def test_samples_that_cannot_be_completed_end_by_name() -> None:
    queue = LocalQueue(["reward", "train"])
    queue.put(batch_of("a", "b", "c"), groups=["g", "g", "h"])
    queue.lose(["c", "nobody", "a"], "damaged")
    assert queue.lost() == [LostSample("c", "h", "lost:damaged"), LostSample("a", "g", "lost:damaged")]
    assert queue.lost(1) == queue.lost()[1:] and queue.stats()["distqueue/ended/lost:damaged"] == 2
    for refused in (
        lambda: queue.read(["a", "b", "c"], ["tokens"]),
        lambda: queue.put(PackedBatch(("a", "b", "c"), {}), claim="train"),
    ):
        with pytest.raises(SamplesLost, match="^sample 'a': lost:damaged$") as error:
            refused()
        assert error.value.ids == ("a", "c") and pickle.loads(pickle.dumps(error.value)).ids == ("a", "c")
    queue.drop(["b"], "stale")
    with pytest.raises(ValueError, match="^sample 'b': dropped:stale$") as other:
        queue.read(["a", "b"], ["tokens"])
    assert not isinstance(other.value, SamplesLost), "what is wrong besides is told first"


def test_a_dropped_sample_ends_under_its_name_and_stragglers_are_late() -> None:
    queue = LocalQueue(["train"])
    queue.put(batch_of("a", "b"))
    queue.drop(["a"], "stale")
    assert queue.put(PackedBatch.from_samples(["a", "b"], {"reward": torch.tensor([1.0, 2.0])})) == ("a",)
    assert queue.get("train", ["reward"], 1)["reward"].buffer.tolist() == [2.0]
    assert queue.stats()["distqueue/ended/dropped:stale"] == queue.stats()["distqueue/late"] == 1


def test_a_timeout_says_what_is_missing() -> None:
    queue = LocalQueue(["train"])
    queue.put(batch_of("a", "b", "c"))
    queue.put(PackedBatch.from_samples(["b"], {"reward": torch.ones(1)}))
    began_s = time.monotonic()
    with pytest.raises(TimeoutError, match="requests 2 samples with .*: 1 samples ready, column 'reward' missing f"):
        queue.get("train", ["tokens", "reward"], 2, timeout_s=0.2)
    took_s = time.monotonic() - began_s
    assert 0.2 <= took_s and within(took_s, 2)
    assert queue.get("train", ["reward"], 1, timeout_s=0).ids == ("b",), "a timeout takes nothing"


def test_a_partial_get_takes_what_is_there() -> None:
    queue = LocalQueue(["train"])
    with pytest.raises(TimeoutError):
        queue.get("train", ["tokens"], 5, partial=True, timeout_s=0)
    queue.put(PackedBatch.from_samples(["a", "b", "c"], {"tokens": [torch.ones(2)] * 3}))
    assert queue.get("train", ["tokens"], 2, partial=True).ids == ("a", "b")
    assert queue.get("train", ["tokens"], 2, partial=True).ids == ("c",)


def test_an_expired_lease_is_handed_out_again_and_an_acknowledged_sample_never() -> None:
    queue = LocalQueue(["train"], lease_s=0.3)
    with ThreadPoolExecutor() as pool:
        asleep = pool.submit(queue.get, "train", ["tokens"], 2, timeout_s=patience(10))
        wait_for_waiters(queue, "train", 1)
        queue.put(batch_of("a"))
        assert queue.get("train", ["tokens"], 1).ids == ("a",)
        queue.put(batch_of("b"))
        began_s = time.monotonic()
        assert asleep.result().ids == ("a", "b"), "one that slept before there was a lease sees it end"
        assert within(time.monotonic() - began_s, 2)
    assert queue.stats()["distqueue/train/redelivered"] == 1
    queue.ack("train", ["a"])
    assert queue.get("train", ["tokens"], 1, timeout_s=patience(2)).ids == ("b",)
    queue.ack("train", ["a", "b"])
    with pytest.raises(TimeoutError):
        queue.get("train", ["tokens"], 1, timeout_s=0.5)
    with pytest.raises(ValueError, match="sample 'a': every task has acknowledged it"):
        queue.put(batch_of("a"))


def test_every_sample_reaches_every_task_once_under_threads() -> None:
    queue, n = LocalQueue(["x", "y"]), 400

    def write(writer: int) -> None:
        for start in range(0, n, 5):
            ids = [f"{writer}-{row}" for row in range(start, start + 5)]
            queue.put(PackedBatch.from_samples(ids, {"tokens": [torch.full((row % 7,), writer) for row in range(5)]}))

    def read(task: str) -> list[str]:
        seen: list[str] = []
        while True:
            try:
                batch = queue.get(task, ["tokens"], 4, timeout_s=patience(1))
            except TimeoutError:
                return seen
            assert all(
                bool((tokens == int(id[0])).all()) for id, tokens in zip(batch.ids, batch["tokens"], strict=True)
            )
            queue.ack(task, batch.ids)
            seen += batch.ids

    with ThreadPoolExecutor(8) as pool:
        readers = {task: [pool.submit(read, task) for _ in range(3)] for task in ("x", "y")}
        list(pool.map(write, range(2)))
        for futures in readers.values():
            seen = [id for future in futures for id in future.result()]
            assert len(seen) == len(set(seen)) == 2 * n
    assert queue.stats()["distqueue/bytes"] == 0


def round_trip_s(queue: LocalQueue, name: str) -> float:
    def one(i: int) -> float:
        began_s = time.perf_counter()
        queue.put(batch_of(f"{name}{i}"))
        queue.ack("busy", queue.get("busy", ["tokens"], 1, timeout_s=patience(10)).ids)
        return time.perf_counter() - began_s

    return statistics.median(one(i) for i in range(100))


def test_a_starved_reader_delays_nobody_and_costs_nothing() -> None:
    queue = LocalQueue(["busy", "starved"])
    alone_s = round_trip_s(queue, "alone")
    reader = threading.Thread(target=lambda: pytest.raises(QueueClosed, queue.get, "starved", ["never"], 1))
    reader.start()
    wait_for_waiters(queue, "starved", 1)
    beside_s = round_trip_s(queue, "beside")
    began_cpu_s = time.process_time()
    time.sleep(0.5)
    assert cpu_within(time.process_time() - began_cpu_s, 0.1), "a waiting reader polls"
    queue.close()
    reader.join(patience(10))
    assert not reader.is_alive() and within(beside_s, alone_s + 0.02)


def test_a_reader_that_leaves_takes_nothing() -> None:
    queue, left = LocalQueue(["train"]), Future()
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(queue.fetch, GetRequest("train", ["tokens"], count=1), left)
        served = pool.submit(queue.get, "train", ["tokens"], 2)
        wait_for_waiters(queue, "train", 2)
        left.set_result(None)
        with pytest.raises(CancelledError):
            leaving.result(timeout=patience(10))
        queue.put(batch_of("a", "b"))
        assert served.result(timeout=patience(10)).ids == ("a", "b")
    with pytest.raises(TimeoutError, match="2 leased and not acknowledged"):
        queue.get("train", ["tokens"], 1, timeout_s=0.05)
    assert queue.stats()["distqueue/train/waiters"] == 0


def test_close_wakes_all_waiters() -> None:
    queue = LocalQueue(["train"])
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(queue.get, "train", ["tokens"], 1) for _ in range(3)]
        wait_for_waiters(queue, "train", 3)
        queue.close()
        for future in waiting:
            with pytest.raises(QueueClosed, match=r"the queue is closed; task 'train' cannot get \['tokens'\]"):
                future.result(timeout=patience(10))
    with pytest.raises(QueueClosed):
        queue.put(batch_of("a"))
