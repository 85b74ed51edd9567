"""Measure DistQueue against its floor and its peers.

One process puts, another gets; medians over alternating rounds. `long`, 512 samples of lognormal lengths (mean about
5.6k, at most 32k); `short`, 8,192 samples of 10 to 300 tokens; five columns of 4 bytes per token each.

    put_s, get_s        this queue; a get ends when the reader owns a copy of every byte
    put_sums_s, …       the part of it that computes checksums; get_sums_s: that verifies them
    hash_s, copy_s      floors: xxh3 of the same bytes, one call per column; np.copyto of them into warm memory
    call_s              floor: an empty call to an actor like the queue's; a put here is one call, ray.put is none
    ray_*               ray.put / ray.get of the same packed arrays, with the copy into warm memory
    transferqueue_*     TransferQueue 0.1.11 with its default storage, where it can be imported
    padded_bytes        size with every sample padded to the longest; payload_bytes: the samples themselves
    sent_bytes, …       bytes of a put, metadata included, counted at the sender; received_bytes: of a get
"""

import importlib.util
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness import Arguments, Benchmark, Figures, Option, in_turns, medians_of, rows_of, timed, timed_result

BENCHMARK = Benchmark(
    __doc__,
    [Option("rounds", 15, smoke=1, help="rounds that are measured")],
    sizes={"samples": (1, 64)},
)
BENCHMARK.run_as(__name__)

import numpy as np
import ray
import torch
from xxhash import xxh3_64_intdigest

from benchmarks.runs import temporary_folder
from distqueue import DistQueue, PackedBatch
from distqueue.payload import gather, segment_file

COLUMNS = dict.fromkeys(("tokens", "mask"), torch.int32)
COLUMNS |= dict.fromkeys(("logprobs", "ref_logprobs", "advantages"), torch.float32)
PEERS = ["ours", "ray"] + ["transferqueue"] * (importlib.util.find_spec("transfer_queue") is not None)


def lengths(workload: str) -> np.ndarray:
    """Return the tokens of each sample, shape (B,). ``workload``: `long` or `short`, and a divisor of their number."""
    kind, part = workload.split("/")
    rng = np.random.default_rng(7)
    if kind == "short":
        return rng.integers(10, 301, 8192 // int(part))
    sizes = np.minimum(rng.lognormal(8.31, 1.0, 512 // int(part)).astype(np.int64) + 1, 32768)
    sizes[0] = 32768
    return sizes


def names_of(workload: str, round: int) -> list[str]:
    return [f"{workload}{round}-{row}" for row in range(len(lengths(workload)))]


def make_columns(workload: str, round: int) -> dict[str, list[torch.Tensor]]:
    """Make the samples of a round as a rollout produces them: one tensor per sample and column."""
    sizes = lengths(workload).tolist()
    flat = {name: torch.arange(round, round + sum(sizes)).to(dtype) for name, dtype in COLUMNS.items()}
    return {name: list(column.split(sizes)) for name, column in flat.items()}


class NoOpActor:
    async def call(self, message: bytes) -> None:
        pass


class Client:
    """Puts or gets samples through each of the compared queues. Each method returns the seconds it took, by name."""

    def __init__(self, queue: DistQueue, no_op: Any) -> None:
        self.queue, self.no_op, self.warm = queue, no_op, np.zeros(1, np.uint8)
        self.sums_s = 0.0
        """Seconds spent on checksums"""
        segment_file.sums_of, gather._verify = self._timed(segment_file.sums_of), self._timed(gather._verify)
        if "transferqueue" in PEERS:
            import transfer_queue

            logging.disable(logging.WARNING)
            transfer_queue.init()

    def _timed(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            seconds, result = timed_result(partial(compute, *args))
            self.sums_s += seconds
            return result

        return counted

    def put_ours(self, workload: str, round: int) -> Figures:
        batch = PackedBatch.from_samples(names_of(workload, round), make_columns(workload, round))
        before, self.sums_s = self.queue.traffic.sent_bytes, 0.0
        seconds = timed(lambda: self.queue.put(batch))
        return {"put_s": seconds, "put_sums_s": self.sums_s, "sent_bytes": self.queue.traffic.sent_bytes - before}

    def get_ours(self, workload: str, round: int) -> Figures:
        before, self.sums_s, sizes = self.queue.traffic.received_bytes, 0.0, lengths(workload)
        get = partial(self.queue.get, "train", list(COLUMNS), len(sizes), timeout_s=60)
        seconds, batch = timed_result(get)
        assert int(batch["mask"].buffer[-1]) == round + int(sizes.sum()) - 1
        self.queue.ack("train", batch.ids)
        received = self.queue.traffic.received_bytes - before
        return {"get_s": seconds, "get_sums_s": self.sums_s, "received_bytes": received}

    def put_ray(self, workload: str, round: int) -> tuple[Figures, list[Any]]:
        arrays = [torch.cat(column).numpy() for column in make_columns(workload, round).values()]
        seconds, ref = timed_result(partial(ray.put, arrays))
        return {"ray_put_s": seconds}, [ref]

    def get_ray(self, workload: str, refs: list[Any]) -> Figures:
        def get(warm: list[np.ndarray]) -> None:
            for target, array in zip(warm, ray.get(refs[0]), strict=True):
                np.copyto(target, array.view(np.uint8))

        return {"ray_get_s": timed(partial(get, self.warmed(workload)))}

    def put_transferqueue(self, workload: str, round: int) -> Figures:
        import transfer_queue
        from tensordict import TensorDict

        columns, keys = make_columns(workload, round), names_of(workload, round)
        nested = {name: torch.nested.as_nested_tensor(c, layout=torch.jagged) for name, c in columns.items()}
        fields = TensorDict(nested, batch_size=len(keys))
        put = partial(transfer_queue.kv_batch_put, keys=keys, partition_id=workload, fields=fields)
        return {"transferqueue_put_s": timed(put)}

    def get_transferqueue(self, workload: str, round: int) -> Figures:
        import transfer_queue

        named = dict(keys=names_of(workload, round), partition_id=workload)
        seconds, batch = timed_result(partial(transfer_queue.kv_batch_get, **named, select_fields=list(COLUMNS)))
        assert int(batch["mask"][-1][-1]) == round + int(lengths(workload).sum()) - 1
        transfer_queue.kv_clear(**named)
        return {"transferqueue_get_s": seconds}

    def floors(self, workload: str) -> Figures:
        """Return the seconds of an actor's call, and of a copy and a hash of the bytes."""
        warm = self.warmed(workload)
        sources = [np.full(len(target), 7, np.uint8) for target in warm]
        message = bytes(20 * len(lengths(workload)))
        return {
            "copy_s": timed(lambda: [np.copyto(*pair) for pair in zip(warm, sources, strict=True)]),
            "hash_s": timed(lambda: [xxh3_64_intdigest(column.data) for column in sources]),
            "call_s": timed(lambda: ray.get(self.no_op.call.remote(message))),
        }

    def warmed(self, workload: str) -> list[np.ndarray]:
        """Return one array per column in this process's memory, whose pages have been written before."""
        total = 4 * int(lengths(workload).sum())
        if len(self.warm) < total * len(COLUMNS):
            self.warm = np.zeros(total * len(COLUMNS), np.uint8)
        return [self.warm[i * total : (i + 1) * total] for i in range(len(COLUMNS))]


def measure(args: Arguments) -> Figures:
    """Measure every workload, by workers at the niceness of this process, as a run does."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: Any = dict(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with temporary_folder(prefix="dq-", dir="/tmp") as folder:  # short: Ray's sockets are below it
        # TransferQueue reserves a core for each of its processes
        ray.init(address="local", num_cpus=16, _temp_dir=str(folder), **options)
        queue, client = DistQueue.create(["train"]), ray.remote(Client).options(num_cpus=0)
        no_op = ray.remote(NoOpActor).options(num_cpus=0).remote()
        sides = dict(rounds=args.rounds, writer=client.remote(queue, no_op), reader=client.remote(queue, no_op))
        figures = rows_of(("long", "short"), lambda kind: measure_workload(f"{kind}/{args.samples}", **sides))
        queue.close()
        ray.shutdown()
    return figures


def measure_workload(workload: str, *, rounds: int, writer: Any, reader: Any) -> Figures:
    """Return medians over all rounds but the first two, and bytes."""

    def trip(peer: str, round: int) -> Figures:
        if peer == "floors":
            return ray.get(reader.floors.remote(workload))
        put = ray.get(getattr(writer, f"put_{peer}").remote(workload, round))
        put, what = put if peer == "ray" else (put, round)
        return put | ray.get(getattr(reader, f"get_{peer}").remote(workload, what))

    sides = {peer: lambda round, peer=peer: trip(peer, round + 2) for peer in ("floors", *PEERS)}
    rows_by_side = in_turns(sides, rounds, warm_ups=2)
    figures: Figures = {name: value for rows in rows_by_side.values() for name, value in medians_of(rows).items()}
    sizes, width = lengths(workload), 4 * len(COLUMNS)
    payload = figures["payload_bytes"] = int(sizes.sum()) * width
    figures["padded_bytes"] = int(sizes.max()) * len(sizes) * width
    figures["sent_over_payload"] = max(figures["sent_bytes"], figures["received_bytes"]) / payload
    return figures
