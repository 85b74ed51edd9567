"""The queue across processes: an actor decides (`host.py`), shards of shared memory hold, and this is the face.

put   the payload is written into shared memory ─► commit, which grants a file for the next      one call
      the first of a client, or one of another size, asks for a file before: reserve             two calls
get   ask ─► samples and where they lie ─► copied from there               one call; more for samples elsewhere
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from distqueue.checkpoint import check as check_checkpoint
from distqueue.config import QueueOptions, check_absolute
from distqueue.core import QueueClosed, Share
from distqueue.host import MAX_CALLS, NAMESPACE, TURN_S, QueueActor, Turn
from distqueue.journal import read_folder
from distqueue.messages import Delivery, File, Put, unpack
from distqueue.packed import PackedBatch
from distqueue.payload.reach import Payloads
from distqueue.payload.segment_file import SegmentGone, lay_out, stretches_of
from distqueue.samples import SampleTable, Span, Want
from distqueue.steps import Steps, run, run_async

log = logging.getLogger(__name__)

MOVES = 10
"""Times that samples may move while they are read before the queue is asked to look for them"""


@dataclass
class Traffic:
    """What this process has exchanged with the queue: requests, and bytes both ways, metadata included."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class DistQueue:
    """A handle on a queue; the face is `LocalQueue`'s. Picklable: pass it to workers. Thread-safe.

    Every method raises what `LocalQueue`'s would, and QueueClosed if the actor is gone.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._payloads = Payloads(self._call)
        self._grants: deque[tuple[float, File]] = deque()
        """Files for puts to come, each until a time by this process's clock"""
        self.traffic = Traffic()

    def __reduce__(self) -> tuple[Any, ...]:
        return DistQueue, (self._actor,)

    @classmethod
    def create(
        cls,
        tasks: Iterable[str],
        options: QueueOptions | None = None,
        *,
        name: str | None = None,
        checkpoint: str | None = None,
        **given: Any,
    ) -> DistQueue:
        """Starts the queue: its actor on this node, a shard on every node. It ends with `close`, or when the process
        that created it ends. `options`, or its fields as arguments; `name`: for `connect` and `python -m distqueue`.
        With a journal that is there already, goes on from it; with the folder of a `checkpoint`, from that: what was
        leased in it is open. ray.init() has been called.

        ValueError names the option that is wrong or not that of the journal or checkpoint, a journal that another queue
        has open, or one that holds a queue already where a checkpoint is to be gone on from.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = replace(options or QueueOptions(), **given)
        options.validate()
        tasks = tuple(tasks)
        SampleTable(tasks, options.lease_s, options.group_size)  # refuses wrong arguments here, not in the actor
        node = ray.get_runtime_context().get_node_id()
        actor_class = ray.remote(QueueActor).options(
            name=name,
            namespace=NAMESPACE,
            num_cpus=0,
            max_concurrency=MAX_CALLS,
            max_restarts=-1 if options.durability == "journal" else 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        if name is not None and name in live_queues():
            raise ValueError(f"name={name!r}: a queue of this name lives in this Ray cluster")
        if checkpoint is not None:
            check_absolute("checkpoint", checkpoint)
            check_checkpoint(checkpoint, tasks, options.group_size)
            if options.journal is not None and read_folder(options.journal)[0] is not None:
                raise ValueError(f"journal={options.journal!r}: it holds a queue; expected a new one for {checkpoint=}")
        queue = cls(actor_class.remote(name or "", tasks, options, node, checkpoint))
        try:
            run(queue._call("start"))
        except ValueError:
            ray.kill(queue._actor)
            raise
        return queue

    @classmethod
    def connect(cls, name: str) -> DistQueue:
        """The queue created under `name` in this Ray cluster. ValueError names those that there are."""
        try:
            return cls(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            found = ", ".join(map(repr, live_queues())) or "none"
            raise ValueError(f"queue {name!r}: not in this Ray cluster; live queues: {found}") from None

    def put(
        self, batch: PackedBatch, groups: Sequence[str] = (), versions: Sequence[int | Span] = ()
    ) -> tuple[str, ...]:
        """See `LocalQueue.put`; returns when the queue has its own copy, so the batch stays the caller's."""
        return run(self._put(batch.labelled(groups, versions)))

    async def put_async(
        self, batch: PackedBatch, groups: Sequence[str] = (), versions: Sequence[int | Span] = ()
    ) -> tuple[str, ...]:
        """`put` for a coroutine."""
        return await run_async(self._put(batch.labelled(groups, versions)))

    def get(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        min_version: int | None = None,
        partial: bool = False,
        share: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """See `LocalQueue.get`."""
        want = Want(task, tuple(columns), count, token_budget, whole_groups, min_version, partial)
        return run(self._get(want, share, timeout_s))

    async def get_async(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        min_version: int | None = None,
        partial: bool = False,
        share: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """`get` for a coroutine. What a get cancelled at the last moment had taken comes back when its lease ends."""
        want = Want(task, tuple(columns), count, token_budget, whole_groups, min_version, partial)
        return await run_async(self._get(want, share, timeout_s))

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """See `LocalQueue.read`."""
        return run(self._read(tuple(ids), tuple(columns)))

    async def read_async(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """`read` for a coroutine."""
        return await run_async(self._read(tuple(ids), tuple(columns)))

    def lengths(self, ids: Sequence[str], columns: Sequence[str]) -> dict[str, list[int]]:
        """See `LocalQueue.lengths`."""
        return run(self._lengths(tuple(ids), tuple(columns)))

    def claim(self, task: str, ids: Iterable[str]) -> None:
        """See `LocalQueue.claim`."""
        run(self._call("call", "claim", task, tuple(ids)))

    def ack(self, task: str, ids: Iterable[str]) -> None:
        """See `LocalQueue.ack`."""
        run(self._call("call", "ack", task, tuple(ids)))

    async def ack_async(self, task: str, ids: Iterable[str]) -> None:
        """`ack` for a coroutine."""
        await run_async(self._call("call", "ack", task, tuple(ids)))

    def drop(self, ids: Iterable[str], reason: str) -> None:
        """See `LocalQueue.drop`."""
        run(self._call("call", "drop", tuple(ids), reason))

    def renew(self, task: str, ids: Iterable[str]) -> None:
        """See `LocalQueue.renew`."""
        run(self._call("call", "renew", task, tuple(ids)))

    def give_back(self, task: str, ids: Iterable[str]) -> None:
        """See `LocalQueue.give_back`."""
        run(self._call("call", "give_back", task, tuple(ids)))

    def seal(self) -> None:
        """See `LocalQueue.seal`."""
        run(self._call("call", "seal"))

    def stats(self) -> dict[str, float]:
        """See `LocalQueue.stats`."""
        return run(self._call("stats"))

    def state(self) -> dict[str, Any]:
        """See `LocalQueue.state`."""
        return json.loads(run(self._call("state")))

    def add_shard(self, node: str) -> str:
        """Starts a shard on a node (its Ray id) that has joined; returns the shard's name."""
        return run(self._call("add_shard", node))

    def remove_shard(self, node: str) -> None:
        """Moves what a node's shard holds to the others and ends it. ValueError: no such shard, or the last one."""
        run(self._call("remove_shard", node))

    def checkpoint(self, folder: str) -> None:
        """Writes the queue as it is at one instant to a new folder, one that every node sees; `create` goes on from it.
        What was answered before this call is in it; puts and gets go on meanwhile. Returns when it is on disk; where it
        was not to be written, nothing of this name is there. ValueError: the folder is there already."""
        check_absolute("checkpoint", folder)
        run(self._call("checkpoint", folder, uuid.uuid4().hex))

    def close(self) -> None:
        """Ends the queue and its processes; whoever waits, and every later call, gets QueueClosed. A journal stays."""
        try:
            run(self._call("close"))
        except QueueClosed:
            return
        ray.kill(self._actor)

    # ---- steps

    def _call(self, method: str, *args: Any, **options: Any) -> Steps[Any]:
        self.traffic.requests += 1
        return (yield partial(getattr(self._actor, method).remote, *args, **options))

    def _put(self, batch: PackedBatch) -> Steps[tuple[str, ...]]:
        if not batch.ids:
            return ()
        contents, message = lay_out(stretches_of(batch)), Put.of(batch).to_bytes()
        where = self._granted(contents.nbytes)
        told = None if where is None else message
        while True:
            if where is None:
                where, told = (yield from self._reserve(message, contents.nbytes)), None
            try:
                yield from self._payloads.write(where, batch, contents)
                self.traffic.sent_bytes += len(message) + contents.sent_bytes
                late, granted = yield from self._commit(where, contents.nbytes, told)
            except LookupError as gone:
                if told is None:
                    log.warning("a put of %d samples is repeated: %s", len(batch), gone)
                self._give_back(where)
                where = None
                continue
            except BaseException:
                self._give_back(where)
                raise
            if granted is not None:
                self._grants.append((time.monotonic() + granted.lease_s / 2, granted))
            return late

    def _granted(self, nbytes: int) -> File | None:
        """The file that the last put left us for this one, if it does."""
        try:
            until_s, file = self._grants.pop()
        except IndexError:
            return None
        if time.monotonic() < until_s and file.fits(nbytes):
            return file
        self._give_back(file)
        return None

    def _commit(self, where: File, nbytes: int, told: bytes | None) -> Steps[Any]:
        return (yield from self._call("commit", where.number, where.path, self._payloads.here(), nbytes, told))

    def _give_back(self, file: File) -> None:
        """Nothing will be written there; nobody waits for the queue to have heard of it."""
        self._actor.cancel.remote(file.number)

    def _reserve(self, message: bytes, nbytes: int) -> Steps[Any]:
        place = None
        while True:
            found = yield from self._call("reserve", message, self._payloads.here(), nbytes, place)
            if not isinstance(found, Turn):
                return found
            place = found.number
            log.warning("a put of %s bytes waits: %s", f"{nbytes:,}", found.why)

    def _get(self, want: Want, share: tuple[int, int] | None, timeout_s: float | None) -> Steps[PackedBatch]:
        part = None if share is None else Share(*share)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        place = None
        while True:
            left_s = TURN_S if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            found = yield from self._call("get", want, part, left_s, place)
            if isinstance(found, Turn):
                if left_s <= TURN_S and deadline_s is not None:
                    raise TimeoutError(found.why)
                place = found.number, found.since_s
                log.info("%s, for %.0f s", found.why, time.time() - found.since_s)
                continue
            self.traffic.received_bytes += len(found)
            delivery = Delivery.from_bytes(found)
            batch = yield from self._fetch(delivery, want.columns)
            if len(batch) or not len(delivery.ids):
                return batch

    def _read(self, ids: tuple[str, ...], columns: tuple[str, ...]) -> Steps[PackedBatch]:
        found = yield from self._call("locate", ids, columns)
        self.traffic.received_bytes += len(found)
        batch = yield from self._fetch(Delivery.from_bytes(found), columns)
        if len(batch) < len(ids):
            yield from self._call("locate", ids, columns)  # says which has ended, and how
        return batch

    def _lengths(self, ids: tuple[str, ...], columns: tuple[str, ...]) -> Steps[dict[str, list[int]]]:
        found = yield from self._call("lengths", ids, columns)
        self.traffic.received_bytes += len(found)
        _, arrays = unpack(found)
        return dict(zip(columns, arrays["lengths"].tolist(), strict=True))

    def _fetch(self, delivery: Delivery, columns: Sequence[str]) -> Steps[PackedBatch]:
        """The payload of a delivery; samples that end meanwhile are left out."""
        too_old, tried = delivery.too_old, 0
        while delivery.ids:
            try:
                found = yield from self._payloads.gather(delivery)
                self.traffic.received_bytes += sum(column.buffer.nbytes for column in found.values())
                return PackedBatch(delivery.ids, found, delivery.groups, delivery.versions, too_old)
            except SegmentGone as gone:  # moved, or written again because its samples have ended; or lost
                tried += 1
                if tried > MOVES:
                    log.warning("samples are not where the queue says: %s", gone)
                    yield from self._call("find_lost", [place.number for place in delivery.places])
                message = yield from self._call("locate", delivery.ids, tuple(columns), skip_ended=True)
                delivery = Delivery.from_bytes(message)
        return PackedBatch((), {}, too_old=too_old)


def live_queues() -> list[str]:
    """Names of the queues of this Ray cluster."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(found["name"] for found in named if found["namespace"] == NAMESPACE)
