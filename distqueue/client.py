"""The queue across processes: `DistQueue`, the handle through which any process of a Ray cluster uses it.

An actor decides (`actor.py`), shards of shared memory hold the payload, and the calls of this file connect both.

put   write the payload into shared memory ─► commit, which also grants a file for the next put   one call
      first put of a client, or of another size: reserve a file before writing                    two calls
get   request ─► ids and where they lie ─► copy from there     one call; further ones for samples on other nodes
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from distqueue.actor import MAX_CALLS, NAMESPACE, TURN_S, PlaceInLine, QueueActor
from distqueue.actor_calls import call
from distqueue.checkpoint import check as check_checkpoint
from distqueue.clock import epoch_s
from distqueue.config import QueueOptions, check_absolute
from distqueue.errors import DAMAGED, LOST, Damage, NoRoomForRows, QueueClosed, SamplesLost
from distqueue.grants import Grants
from distqueue.interface import Change, SampleQueue
from distqueue.journal import read_folder
from distqueue.messages import Delivery, File, Put
from distqueue.packed import PackedBatch
from distqueue.payload.access import PayloadAccess
from distqueue.payload.columns import packed, stretches_of
from distqueue.payload.segment_file import SegmentDamaged, SegmentGone, lay_out
from distqueue.request import GetRequest
from distqueue.samples import SampleTable

log = logging.getLogger(__name__)

MAX_MOVES = 10
"""Times samples may move while they are read before the queue is asked to look for lost files"""


@dataclass
class QueueTraffic:
    """Requests this process has made to the queue, and bytes it exchanged with it, metadata included."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class DistQueue(SampleQueue):
    """A handle on a queue. Picklable: pass it to workers. Thread-safe.

    Every method raises what `SampleQueue` states, and QueueClosed if the actor has ended."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._payload = PayloadAccess(self._call)
        self._grants = Grants(self._cancel)
        self.traffic = QueueTraffic()
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
    ) -> "DistQueue":
        """Start a queue: its actor on this node, a shard on every node. Call ray.init() before.

        The queue ends with `close`, or with the process that created it. `options`: or its fields as arguments;
        `name`: for `connect` and `python -m distqueue`. An existing journal is resumed; so is the folder of a
        `checkpoint`, in which no sample is leased.

        ValueError names the option that is wrong or differs from the journal's or checkpoint's, a journal that another
        queue has open, and a journal that already holds a queue where a checkpoint is to be resumed."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = replace(options or QueueOptions(), **fields)
        options.validate()
        tasks = tuple(tasks)
        SampleTable(tasks, options.lease_s)  # raises for wrong arguments here, not in the actor
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
            check_checkpoint(checkpoint, tasks)
            if options.journal is not None and read_folder(options.journal).snapshot is not None:
                raise ValueError(f"journal={options.journal!r}: it holds a queue; expected a new one for {checkpoint=}")
        actor = actor_class.remote(name=name or "", tasks=tasks, options=options, node=node, checkpoint=checkpoint)
        queue = cls(actor)
        try:
            queue._call("start")
        except ValueError:
            ray.kill(queue._actor)
            raise
        return queue

    @classmethod
    def connect(cls, name: str) -> "DistQueue":
        """Return a handle on the queue created under `name` in this Ray cluster. ValueError lists the live queues."""
        try:
            return cls(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            names = ", ".join(map(repr, live_queues())) or "none"
            raise ValueError(f"queue {name!r}: not in this Ray cluster; live queues: {names}") from None

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        ids, columns = tuple(ids), tuple(columns)
        damage: list[Damage] = []
        batch = self._copy(self._locate(ids, columns), columns, damage)
        if len(batch) < len(ids):
            try:
                self._locate(ids, columns)  # raises, naming the sample that has ended and how
            except SamplesLost as error:
                where = next((f"; {report}" for report in damage if error.ids[0] in report.ids), "")
                raise SamplesLost(error.ids, f"{error}{where}") from None
        return batch

    def stats(self) -> dict[str, float]:
        return self._call("change", "stats")

    def ack_with_stats(self, task: str, ids: Iterable[str]) -> dict[str, float]:
        """`ack`, then `stats`, by one call of the actor, which does nothing between them."""
        return self._call("change", "ack_with_stats", task, tuple(ids))

    def state(self) -> dict[str, Any]:
        return json.loads(self._call("state"))

    def add_shard(self, node: str) -> str:
        """Start a shard on a node (its Ray id) that has joined. Return the shard's name."""
        return self._call("ask_fleet", "add", node)

    def remove_shard(self, node: str) -> None:
        """Drain a node's shard to the others and end it. ValueError: no such shard, or the last one."""
        self._call("ask_fleet", "remove", node)

    def checkpoint(self, folder: str) -> None:
        """Write the queue as of one instant to a new folder that every node sees; `create` resumes it.

        Every call that was answered before this one is in it; puts and gets continue meanwhile. Return when the
        checkpoint is on disk; if it fails, no folder of this name exists. ValueError: the folder exists."""
        check_absolute("checkpoint", folder)
        self._call("checkpoint", folder, uuid.uuid4().hex)

    def close(self) -> None:
        try:
            self._call("close")
        except QueueClosed:
            return
        self._closed = True  # the actor may answer a little longer
        ray.kill(self._actor)

    def fetch(self, request: GetRequest, left: Future[None] | None = None) -> PackedBatch:
        selection = request.selection()
        deadline_s = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        turn = None
        while True:
            left_s = TURN_S if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            answer = self._call("get", left=left, selection=selection, wait_s=left_s, turn=turn)
            if isinstance(answer, PlaceInLine):
                if left_s <= TURN_S and deadline_s is not None:
                    raise TimeoutError(answer.why)
                turn = answer
                log.info("%s, for %.0f s", answer.why, epoch_s() - answer.since_s)
                continue
            delivery = self._received(answer)
            batch = self._copy(delivery, selection.columns)
            if len(batch) or not len(delivery.ids):
                return batch

    # ---- calls of the actor

    def _call(self, method: str, *args: Any, left: Future[None] | None = None, **options: Any) -> Any:
        if self._closed:
            raise QueueClosed("the queue is closed")
        self.traffic.requests += 1
        return call(partial(getattr(self._actor, method).remote, *args, **options), left)

    def _change(self, change: Change[...], *args: Any) -> None:
        self._call("change", change.__name__, *args)

    def _look(self, look: Callable[..., Any], *args: Any) -> Any:
        answer = self._call("look", look.__name__, *args)
        self.traffic.received_bytes += getattr(answer, "nbytes", 0)
        return answer

    def _put(self, batch: PackedBatch, claim: str) -> tuple[str, ...]:
        if not batch.ids:
            return ()
        columns, message = stretches_of(batch), Put.of(batch, claim).to_bytes()
        contents = lay_out(columns)
        file = self._grants.take(contents.nbytes, time.monotonic())
        unannounced = None if file is None else message  # a reservation has announced the put already
        while True:
            if file is None:
                file, unannounced = self._reserve(message, contents.nbytes), None
            try:
                self._payload.write(file, columns, contents)
                self.traffic.sent_bytes += len(message) + contents.sent_bytes
                place: dict[str, Any] = {"number": file.number, "path": file.path, "node": self._payload.here()}
                late, granted = self._call("commit", **place, nbytes=contents.nbytes, message=unannounced)
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

    def _cancel(self, file: File) -> None:
        """Give a file back without waiting for the answer: nothing will be written to it."""
        self._actor.change.remote("cancel", file.number)

    def _reserve(self, message: bytes, nbytes: int) -> File:
        number, node = None, self._payload.here()
        while True:
            answer = self._call("reserve", message=message, node=node, nbytes=nbytes, number=number)
            if not isinstance(answer, PlaceInLine):
                return answer
            number = answer.number
            log.warning("a put of %s bytes is waiting: %s", f"{nbytes:,}", answer.why)

    def _locate(self, ids: Sequence[str], columns: Sequence[str], **options: Any) -> Delivery:
        return self._received(self._call("locate", ids, columns, **options))

    def _received(self, message: bytes) -> Delivery:
        self.traffic.received_bytes += len(message)
        return Delivery.from_bytes(message)

    def _copy(self, delivery: Delivery, columns: Sequence[str], damage: list[Damage] | None = None) -> PackedBatch:
        """Copy the payload of a delivery; samples that end meanwhile, also because they are damaged, are left out.
        `damage`: receives what is damaged."""
        moves = 0
        while delivery.ids:
            try:
                gathered = self._payload.gather(delivery)
                self.traffic.received_bytes += sum(column.buffer.nbytes for column in gathered.values())
                return packed(delivery, gathered)
            except SegmentGone as error:  # moved, overwritten because its samples have ended, or lost
                moves += 1
                if moves > MAX_MOVES:
                    log.warning("samples are not where the queue expects them: %s", str(error))
                    self._call("ask_fleet", "find_lost", [place.number for place in delivery.places])
                delivery = self._locate_again(delivery, columns)
            except SegmentDamaged as error:
                before = len(delivery.ids)
                for number in error.numbers:
                    for one in self._call("ask_fleet", "find_damaged", number):
                        log.error("%s; these samples end as %s%s", one, LOST, DAMAGED)
                        if damage is not None:
                            damage.append(one)
                delivery = self._locate_again(delivery, columns)
                moves = 0 if len(delivery.ids) < before else moves + 1
                if moves > MAX_MOVES:  # as it is stored it is not damaged
                    raise RuntimeError(f"{error}; in this process's memory, not where they are stored") from None
        return PackedBatch((), {})

    def _locate_again(self, delivery: Delivery, columns: Sequence[str]) -> Delivery:
        return self._locate(delivery.ids, tuple(columns), lengths=tuple(delivery.lengths), skip_ended=True)


def live_queues() -> list[str]:
    """List the names of the queues of this Ray cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
