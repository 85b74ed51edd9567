"""Time samples on their way between processes for `benchmarks/distqueue.py`, through this queue and its peers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from xxhash import xxh3_64_intdigest

from benchmarks.local_ray import start_ray
from benchmarks.rotation import in_rotation
from distqueue import DistQueue, PackedBatch
from distqueue.payload import gather, segment_file

COLUMNS = {
    "tokens": torch.int32,
    "mask": torch.int32,
    "logprobs": torch.float32,
    "ref_logprobs": torch.float32,
    "advantages": torch.float32,
}
PEERS = ["ours", "ray"] + ["transferqueue"] * (importlib.util.find_spec("transfer_queue") is not None)


def lengths(workload: str) -> np.ndarray:
    """Return the number of tokens of each sample, shape (B,)."""
    rng = np.random.default_rng(7)
    if workload == "short":
        return rng.integers(10, 301, 8192)
    sizes = np.minimum(rng.lognormal(8.31, 1.0, 512).astype(np.int64) + 1, 32768)
    sizes[0] = 32768
    return sizes


def make_columns(workload: str, round: int) -> dict[str, list[torch.Tensor]]:
    """Make the samples of a round as a rollout produces them: one tensor per sample and column."""
    sizes = lengths(workload).tolist()
    total = sum(sizes)
    flat = {name: torch.arange(round, round + total).to(dtype) for name, dtype in COLUMNS.items()}
    return {name: list(column.split(sizes)) for name, column in flat.items()}


class NoOpActor:
    async def call(self, message: bytes) -> None:
        pass


class Client:
    """Puts or gets samples through each of the compared queues. Each method returns the seconds it took."""

    def __init__(self, queue: DistQueue, no_op: Any, peers: list[str]) -> None:
        self.queue, self.no_op, self.warm = queue, no_op, np.zeros(1, np.uint8)
        self.sums_s = 0.0
        """Seconds spent on checksums"""
        segment_file.sums_of, gather._verify = self._timed(segment_file.sums_of), self._timed(gather._verify)
        if "transferqueue" in peers:
            import transfer_queue

            logging.disable(logging.WARNING)
            transfer_queue.init()

    def _timed(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began_s = time.perf_counter()
            result = compute(*args)
            self.sums_s += time.perf_counter() - began_s
            return result

        return timed

    def put_ours(self, workload: str, round: int) -> tuple[float, float, int]:
        ids = [f"{workload}{round}-{row}" for row in range(len(lengths(workload)))]
        batch = PackedBatch.from_samples(ids, make_columns(workload, round))
        before, self.sums_s, began_s = self.queue.traffic.sent_bytes, 0.0, time.perf_counter()
        self.queue.put(batch)
        return time.perf_counter() - began_s, self.sums_s, self.queue.traffic.sent_bytes - before

    def get_ours(self, workload: str, round: int) -> tuple[float, float, int]:
        before, self.sums_s, began_s = self.queue.traffic.received_bytes, 0.0, time.perf_counter()
        batch = self.queue.get("train", list(COLUMNS), len(lengths(workload)), timeout_s=60)
        seconds = time.perf_counter() - began_s
        assert int(batch["mask"].buffer[-1]) == round + int(lengths(workload).sum()) - 1
        self.queue.ack("train", batch.ids)
        return seconds, self.sums_s, self.queue.traffic.received_bytes - before

    def put_ray(self, workload: str, round: int) -> tuple[float, list[Any]]:
        columns = make_columns(workload, round)
        arrays = [torch.cat(column).numpy() for column in columns.values()]
        began_s = time.perf_counter()
        ref = ray.put(arrays)
        return time.perf_counter() - began_s, [ref]

    def get_ray(self, workload: str, refs: list[Any]) -> float:
        warm = self.warmed(workload)
        began_s = time.perf_counter()
        for target, array in zip(warm, ray.get(refs[0]), strict=True):
            np.copyto(target, array.view(np.uint8))
        return time.perf_counter() - began_s

    def put_transferqueue(self, workload: str, round: int) -> float:
        import transfer_queue
        from tensordict import TensorDict

        columns = make_columns(workload, round)
        size = len(lengths(workload))
        nested = {name: torch.nested.as_nested_tensor(c, layout=torch.jagged) for name, c in columns.items()}
        fields = TensorDict(nested, batch_size=size)
        keys = [f"{workload}{round}-{row}" for row in range(size)]
        began_s = time.perf_counter()
        transfer_queue.kv_batch_put(keys=keys, partition_id=workload, fields=fields)
        return time.perf_counter() - began_s

    def get_transferqueue(self, workload: str, round: int) -> float:
        import transfer_queue

        keys = [f"{workload}{round}-{row}" for row in range(len(lengths(workload)))]
        began_s = time.perf_counter()
        batch = transfer_queue.kv_batch_get(keys=keys, partition_id=workload, select_fields=list(COLUMNS))
        seconds = time.perf_counter() - began_s
        assert int(batch["mask"][-1][-1]) == round + int(lengths(workload).sum()) - 1
        transfer_queue.kv_clear(keys=keys, partition_id=workload)
        return seconds

    def call(self, workload: str) -> float:
        message = bytes(20 * len(lengths(workload)))
        began_s = time.perf_counter()
        ray.get(self.no_op.call.remote(message))
        return time.perf_counter() - began_s

    def copy(self, workload: str) -> float:
        warm = self.warmed(workload)
        sources = [np.full(len(target), 7, np.uint8) for target in warm]
        began_s = time.perf_counter()
        for target, source in zip(warm, sources, strict=True):
            np.copyto(target, source)
        return time.perf_counter() - began_s

    def hash(self, workload: str) -> float:
        columns = [np.full(4 * int(lengths(workload).sum()), 7, np.uint8) for _ in COLUMNS]
        began_s = time.perf_counter()
        for column in columns:
            xxh3_64_intdigest(column.data)
        return time.perf_counter() - began_s

    def warmed(self, workload: str) -> list[np.ndarray]:
        """Return one array per column in this process's memory, whose pages have been written before."""
        total = 4 * int(lengths(workload).sum())
        if len(self.warm) < total * len(COLUMNS):
            self.warm = np.zeros(total * len(COLUMNS), np.uint8)
        return [self.warm[i * total : (i + 1) * total] for i in range(len(COLUMNS))]


def measure_workload(workload: str, *, rounds: int, writer: Any, reader: Any) -> dict[str, float]:
    """Return medians over all rounds but the first two; every round runs all peers, in rotating order."""
    seconds: dict[str, list[float]] = {}
    sent = received = 0
    for round in range(rounds + 2):
        times: dict[str, float] = {
            "copy_s": ray.get(reader.copy.remote(workload)),
            "hash_s": ray.get(reader.hash.remote(workload)),
            "call_s": ray.get(reader.call.remote(workload)),
        }
        for peer in in_rotation(PEERS, round):
            if peer == "ours":
                times["put_s"], times["put_sums_s"], sent = ray.get(writer.put_ours.remote(workload, round))
                times["get_s"], times["get_sums_s"], received = ray.get(reader.get_ours.remote(workload, round))
            elif peer == "ray":
                times["ray_put_s"], refs = ray.get(writer.put_ray.remote(workload, round))
                times["ray_get_s"] = ray.get(reader.get_ray.remote(workload, refs))
            else:
                times["transferqueue_put_s"] = ray.get(writer.put_transferqueue.remote(workload, round))
                times["transferqueue_get_s"] = ray.get(reader.get_transferqueue.remote(workload, round))
        if round >= 2:
            for name, value in times.items():
                seconds.setdefault(name, []).append(value)
    sizes, width = lengths(workload), 4 * len(COLUMNS)
    figures = {name: statistics.median(values) for name, values in seconds.items()}
    figures |= {"payload_bytes": int(sizes.sum()) * width, "padded_bytes": int(sizes.max()) * len(sizes) * width}
    return figures | {"sent_bytes": sent, "received_bytes": received}


def measure_starved(queue: DistQueue, *, rounds: int = 4, trips: int = 50, readers: int = 512) -> dict[str, float]:
    """Return the median milliseconds of one client's put, get and ack, alone and beside ``readers`` blocked gets.

    Every round measures ``trips`` of both, in rotating order, after a few that warm up.
    """

    def round_trips(name: str) -> list[float]:
        seconds = []
        for i in range(trips + trips // 10):
            batch = PackedBatch.from_samples([f"{name}-{i}"], {"tokens": [torch.arange(100, dtype=torch.int32)]})
            began_s = time.perf_counter()
            queue.put(batch)
            queue.ack("train", queue.get("train", ["tokens"], 1).ids)
            seconds.append(time.perf_counter() - began_s)
        return seconds[trips // 10 :]

    async def until_blocked(count: int) -> None:
        while (await asyncio.to_thread(queue.stats))["distqueue/train/waiters"] != count:
            await asyncio.sleep(0.05)

    async def beside(name: str) -> list[float]:
        waiting = [asyncio.create_task(queue.get_async("train", ["never"], 1)) for _ in range(readers)]
        await until_blocked(readers)
        seconds = await asyncio.to_thread(round_trips, name)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await until_blocked(0)
        return seconds

    sides = {"alone": round_trips, "beside": lambda name: asyncio.run(beside(name))}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round in range(rounds):
        for name in in_rotation(list(sides), round):
            seconds[name] += sides[name](f"{name}-{round}")
    return {f"{name}_ms": statistics.median(values) * 1e3 for name, values in seconds.items()} | {"readers": readers}


def measure(rounds: int) -> dict[str, Any]:
    """Measure every workload, and a client beside blocked readers, on a Ray of its own; print the figures."""
    figures: dict[str, Any] = {}
    start_ray(num_cpus=16)  # TransferQueue reserves a core for each of its processes
    queue = DistQueue.create(["train"])
    client = ray.remote(Client).options(num_cpus=0)
    no_op = ray.remote(NoOpActor).options(num_cpus=0).remote()
    writer, reader = client.remote(queue, no_op, PEERS), client.remote(queue, no_op, PEERS)
    for workload in ("long", "short"):
        figures[workload] = measure_workload(workload, rounds=rounds, writer=writer, reader=reader)
        print_figures(workload, figures[workload])
    queue.close()
    queue = DistQueue.create(["train"])
    figures["starved"] = measure_starved(queue)
    print("put, get and ack in ms, alone and beside blocked readers:", json.dumps(figures["starved"]))
    queue.close()
    ray.shutdown()
    return figures


def print_figures(workload: str, figures: dict[str, float]) -> None:
    copy_s = figures["copy_s"]
    payload, sent = figures["payload_bytes"], max(figures["sent_bytes"], figures["received_bytes"])
    print(
        f"{workload}: {payload / 1e6:.1f} MB of samples, {figures['padded_bytes'] / 1e6:.1f} MB padded; sent "
        f"{sent / payload:.4f} times the samples' bytes, {1 - sent / figures['padded_bytes']:.1%} less than padded"
    )
    print(f"  floor (copy into warm memory)  {copy_s * 1e3:8.2f} ms; an actor call {figures['call_s'] * 1e3:.2f} ms")
    for peer, prefix in (("this queue", ""), ("Ray alone", "ray_"), ("TransferQueue", "transferqueue_")):
        if f"{prefix}put_s" not in figures:
            print(f"  {peer:<16}not installed")
            continue
        put_s, get_s = figures[f"{prefix}put_s"], figures[f"{prefix}get_s"]
        against = f"   {put_s / figures['put_s']:5.1f} x, {get_s / figures['get_s']:5.1f} x ours" if prefix else ""
        print(
            f"  {peer:<16}put {put_s * 1e3:8.2f} ms ({put_s / copy_s:5.1f} x copy)"
            f"   get {get_s * 1e3:8.2f} ms ({get_s / copy_s:5.1f} x copy){against}"
        )
        if not prefix:
            put_ms, get_ms, hash_ms = (figures[name] * 1e3 for name in ("put_sums_s", "get_sums_s", "hash_s"))
            print(f"    its checksums {put_ms:10.2f} ms{get_ms:31.2f} ms                floor (hash) {hash_ms:.2f} ms")
