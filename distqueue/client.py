"""The queue across processes: `DistQueue`, the handle through which any process of a Ray cluster uses it.

An actor decides (`actor.py`), shards of shared memory hold the payload, and the calls of this file connect both.

put   write the payload into shared memory ─► commit, which also grants a file for the next put   one call
      first put of a client, or of another size: reserve a file before writing                    two calls
get   request ─► ids and where they lie ─► copy from there     one call; further ones for samples on other nodes
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from distqueue.actor import MAX_CALLS, NAMESPACE, TURN_S, QueueActor, Turn
from distqueue.actor_calls import Calls, run, run_async
from distqueue.checkpoint import check as check_checkpoint
from distqueue.config import QueueOptions, check_absolute
from distqueue.core import QueueClosed, QueueCore
from distqueue.errors import DAMAGED, LOST, Damage, LostSample, NoRoomForRows, SamplesLost
from distqueue.grants import Grants
from distqueue.interface import Change, SampleQueue
from distqueue.journal import read_folder
from distqueue.messages import Delivery, File, Put, unpack
from distqueue.packed import PackedBatch
from distqueue.payload.access import PayloadAccess
from distqueue.payload.columns import stretches_of
from distqueue.payload.segment_file import SegmentDamaged, SegmentGone, lay_out
from distqueue.request import GetRequest
from distqueue.samples import SampleTable, Span

log = logging.getLogger(__name__)

MAX_MOVES = 10
"""Times samples may move while they are read before the queue is asked to look for lost files"""


@dataclass
class Traffic:
    """Requests this process has made to the queue, and bytes it exchanged with it, metadata included."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class DistQueue(SampleQueue):
    """A handle on a queue. Picklable: pass it to workers. Thread-safe.

    Every method raises what `SampleQueue` states, and QueueClosed if the actor has ended.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._payload = PayloadAccess(self._call)
        self._grants = Grants(self._cancel)
        self.traffic = Traffic()
        self._closed = False

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
        **fields: Any,
    ) -> DistQueue:
        """Start a queue: its actor on this node, a shard on every node. Call ray.init() before.

        The queue ends with `close`, or with the process that created it. `options`: or its fields as arguments;
        `name`: for `connect` and `python -m distqueue`. An existing journal is resumed; so is the folder of a
        `checkpoint`, in which no sample is leased.

        ValueError names the option that is wrong or differs from the journal's or checkpoint's, a journal that another
        queue has open, and a journal that already holds a queue where a checkpoint is to be resumed.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = replace(options or QueueOptions(), **fields)
        options.validate()
        tasks = tuple(tasks)
        SampleTable(tasks, options.lease_s, options.group_size)  # raises for wrong arguments here, not in the actor
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
            raise ValueError(f"name={name!r}: a queue of this name exists in this Ray cluster")
        if checkpoint is not None:
            check_absolute("checkpoint", checkpoint)
            check_checkpoint(checkpoint, tasks, options.group_size)
            if options.journal is not None and read_folder(options.journal).snapshot is not None:
                raise ValueError(f"journal={options.journal!r}: it holds a queue; expected a new one for {checkpoint=}")
        actor = actor_class.remote(name=name or "", tasks=tasks, options=options, node=node, checkpoint=checkpoint)
        queue = cls(actor)
        try:
            run(queue._call("start"))
        except ValueError:
            ray.kill(queue._actor)
            raise
        return queue

    @classmethod
    def connect(cls, name: str) -> DistQueue:
        """Return a handle on the queue created under `name` in this Ray cluster. ValueError lists the live queues."""
        try:
            return cls(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            names = ", ".join(map(repr, live_queues())) or "none"
            raise ValueError(f"queue {name!r}: not in this Ray cluster; live queues: {names}") from None

    async def put_async(
        self, batch: PackedBatch, groups: Sequence[str] = (), versions: Sequence[int | Span] = ()
    ) -> tuple[str, ...]:
        """`put` for a coroutine."""
        return await run_async(self._put_calls(batch.labelled(groups, versions)))

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        return run(self._read_calls(tuple(ids), tuple(columns)))

    async def read_async(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """`read` for a coroutine."""
        return await run_async(self._read_calls(tuple(ids), tuple(columns)))

    def lengths(self, ids: Sequence[str], columns: Sequence[str]) -> dict[str, list[int]]:
        message = run(self._call("lengths", tuple(ids), tuple(columns)))
        self.traffic.received_bytes += len(message)
        _, arrays = unpack(message)
        return dict(zip(columns, arrays["lengths"].tolist(), strict=True))

    def holding(self, column: str) -> list[str]:
        return run(self._call("holding", column))

    def lost(self, first: int = 0) -> list[LostSample]:
        return run(self._call("lost", first))

    async def ack_async(self, task: str, ids: Iterable[str]) -> None:
        """`ack` for a coroutine."""
        await run_async(self._change_calls(QueueCore.ack, task, tuple(ids)))

    def stats(self) -> dict[str, float]:
        return run(self._call("stats"))

    def ack_with_stats(self, task: str, ids: Iterable[str]) -> dict[str, float]:
        """`ack`, then `stats`, by one call of the actor, which does nothing between them."""
        return run(self._call("ack_with_stats", task, tuple(ids)))

    def state(self) -> dict[str, Any]:
        return json.loads(run(self._call("state")))

    def add_shard(self, node: str) -> str:
        """Start a shard on a node (its Ray id) that has joined. Returns the shard's name."""
        return run(self._call("add_shard", node))

    def remove_shard(self, node: str) -> None:
        """Drain a node's shard to the others and end it. ValueError: no such shard, or the last one."""
        run(self._call("remove_shard", node))

    def checkpoint(self, folder: str) -> None:
        """Write the queue as of one instant to a new folder that every node sees; `create` resumes it.

        Every call that was answered before this one is in it; puts and gets continue meanwhile. Returns when the
        checkpoint is on disk; if it fails, no folder of this name exists. ValueError: the folder exists.
        """
        check_absolute("checkpoint", folder)
        run(self._call("checkpoint", folder, uuid.uuid4().hex))

    def close(self) -> None:
        try:
            run(self._call("close"))
        except QueueClosed:
            return
        self._closed = True  # the actor may answer a little longer
        ray.kill(self._actor)

    # ---- calls of the actor

    def _put(self, batch: PackedBatch) -> tuple[str, ...]:
        return run(self._put_calls(batch))

    def _get(self, request: GetRequest) -> PackedBatch:
        return run(self._get_calls(request))

    async def _get_async(self, request: GetRequest) -> PackedBatch:
        return await run_async(self._get_calls(request))

    def _change(self, change: Change[...], *args: Any) -> None:
        run(self._change_calls(change, *args))

    def _change_calls(self, change: Change[...], *args: Any) -> Calls[Any]:
        return self._call("change", change.__name__, *args)

    def _call(self, method: str, *args: Any, **options: Any) -> Calls[Any]:
        if self._closed:
            raise QueueClosed("the queue is closed")
        self.traffic.requests += 1
        return (yield partial(getattr(self._actor, method).remote, *args, **options))

    def _put_calls(self, batch: PackedBatch) -> Calls[tuple[str, ...]]:
        if not batch.ids:
            return ()
        columns, message = stretches_of(batch), Put.of(batch).to_bytes()
        contents = lay_out(columns)
        file = self._grants.take(contents.nbytes, time.monotonic())
        unannounced = None if file is None else message  # a reservation has announced the put already
        while True:
            if file is None:
                file, unannounced = (yield from self._reserve(message, contents.nbytes)), None
            try:
                yield from self._payload.write(file, columns, contents)
                self.traffic.sent_bytes += len(message) + contents.sent_bytes
                late, granted = yield from self._commit(file, contents.nbytes, unannounced)
            except LookupError as error:
                if unannounced is None:
                    log.warning("repeating a put of %d samples: %s", len(batch), str(error))
                elif not isinstance(error, NoRoomForRows):
                    self._grants.clear()
                self._cancel(file)
                file = None
                continue
            except BaseException:
                self._cancel(file)
                raise
            if granted is not None:
                self._grants.keep(granted, time.monotonic())
            return late

    def _commit(self, file: File, nbytes: int, message: bytes | None) -> Calls[Any]:
        node = self._payload.here()
        return (
            yield from self._call(
                "commit", number=file.number, path=file.path, node=node, nbytes=nbytes, message=message
            )
        )

    def _cancel(self, file: File) -> None:
        """Give a file back without waiting for the answer: nothing will be written to it."""
        self._actor.cancel.remote(file.number)

    def _reserve(self, message: bytes, nbytes: int) -> Calls[File]:
        number = None
        while True:
            answer = yield from self._call(
                "reserve", message=message, node=self._payload.here(), nbytes=nbytes, number=number
            )
            if not isinstance(answer, Turn):
                return answer
            number = answer.number
            log.warning("a put of %s bytes is waiting: %s", f"{nbytes:,}", answer.why)

    def _locate_again(self, delivery: Delivery, columns: Sequence[str]) -> Calls[Delivery]:
        """Locate the samples of a delivery that have not ended."""
        message = yield from self._call(
            "locate", delivery.ids, tuple(columns), lengths=tuple(delivery.lengths), skip_ended=True
        )
        return Delivery.from_bytes(message)

    def _get_calls(self, request: GetRequest) -> Calls[PackedBatch]:
        selection, share = request.selection(), request.part()
        deadline_s = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        turn = None
        while True:
            left_s = TURN_S if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            answer = yield from self._call("get", selection=selection, share=share, wait_s=left_s, turn=turn)
            if isinstance(answer, Turn):
                if left_s <= TURN_S and deadline_s is not None:
                    raise TimeoutError(answer.why)
                turn = answer
                log.info("%s, for %.0f s", answer.why, time.time() - answer.since_s)
                continue
            self.traffic.received_bytes += len(answer)
            delivery = Delivery.from_bytes(answer)
            batch = yield from self._fetch(delivery, selection.columns)
            if len(batch) or not len(delivery.ids):
                return batch

    def _read_calls(self, ids: tuple[str, ...], columns: tuple[str, ...]) -> Calls[PackedBatch]:
        message = yield from self._call("locate", ids, columns)
        self.traffic.received_bytes += len(message)
        damage: list[Damage] = []
        batch = yield from self._fetch(Delivery.from_bytes(message), columns, damage)
        if len(batch) < len(ids):
            try:
                yield from self._call("locate", ids, columns)  # raises, naming the sample that has ended and how
            except SamplesLost as error:
                where = next((f"; {one}" for one in damage if error.ids[0] in one.ids), "")
                raise SamplesLost(error.ids, f"{error}{where}") from None
        return batch

    def _fetch(
        self, delivery: Delivery, columns: Sequence[str], damage: list[Damage] | None = None
    ) -> Calls[PackedBatch]:
        """Copy the payload of a delivery; samples that end meanwhile, also because they are damaged, are left out.
        `damage`: receives what is damaged."""
        too_old, moves = delivery.too_old, 0
        while delivery.ids:
            try:
                gathered = yield from self._payload.gather(delivery)
                self.traffic.received_bytes += sum(column.buffer.nbytes for column in gathered.values())
                return PackedBatch(
                    ids=delivery.ids,
                    columns=gathered,
                    groups=delivery.groups,
                    versions=delivery.versions,
                    too_old=too_old,
                    lengths={name: lengths_B.tolist() for name, lengths_B in delivery.lengths.items()},
                )
            except SegmentGone as error:  # moved, overwritten because its samples have ended, or lost
                moves += 1
                if moves > MAX_MOVES:
                    log.warning("samples are not where the queue expects them: %s", str(error))
                    yield from self._call("find_lost", [place.number for place in delivery.places])
                delivery = yield from self._locate_again(delivery, columns)
            except SegmentDamaged as error:
                before = len(delivery.ids)
                for number in error.numbers:
                    for one in (yield from self._call("find_damaged", number)):
                        log.error("%s; these samples end as %s%s", one, LOST, DAMAGED)
                        if damage is not None:
                            damage.append(one)
                delivery = yield from self._locate_again(delivery, columns)
                moves = 0 if len(delivery.ids) < before else moves + 1
                if moves > MAX_MOVES:  # as it is stored it is not damaged
                    raise RuntimeError(f"{error}; in this process's memory, not where they are stored") from None
        return PackedBatch((), {}, too_old=too_old)


def live_queues() -> list[str]:
    """List the names of the queues of this Ray cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
