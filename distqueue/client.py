"""The queue across processes: an actor decides (`host.py`), shards of shared memory hold, and this is the face.

    put   reserve ─► the payload is written into shared memory ─► commit          two calls
    get   ask ─► samples and where they lie ─► copied from there                  one call; more for samples elsewhere

Each step of a client is a call of an actor; the same steps are driven by `ray.get` for threads and by `await` for
coroutines. An actor that is started anew (after it was killed, with a journal) is awaited, and asked again: every call
may be repeated without harm.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray

from distqueue.buffers import WarmBuffers
from distqueue.config import QueueOptions
from distqueue.core import QueueClosed, Share
from distqueue.gather import gather_columns
from distqueue.host import GONE, MAX_CALLS, NAMESPACE, TURN_S, UNAVAILABLE, QueueActor, Turn
from distqueue.messages import Delivery, Part, Place, Put
from distqueue.packed import PackedBatch
from distqueue.samples import SampleTable, Span, Want
from distqueue.segment_file import Contents, SegmentGone, Stretch, bare_bytes, lay_out, stretches_of
from distqueue.shard import Mapped
from distqueue.wire import from_wire, to_wire

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""An actor or shard that is being started anew is awaited for this long"""

RETRY_S = 0.2
"""… and asked again this often"""

T = TypeVar("T")
Steps = Generator[Callable[[], Any], Any, T]
"""Yields calls that make an object reference each, is sent what they return"""


@dataclass
class Traffic:
    """What this process has exchanged with the queue: requests, and bytes both ways, metadata included."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class ActorGone(QueueClosed):
    """An actor that was called has ended for good."""


class DistQueue:
    """A handle on a queue; the face is `LocalQueue`'s. Picklable: pass it to workers. Thread-safe.

    Every method raises what `LocalQueue`'s would, and QueueClosed if the actor is gone.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._mapped, self._buffers = Mapped(), WarmBuffers()
        self._shards: dict[str, tuple[str, Any]] = {}
        self._node = ""
        self.traffic = Traffic()

    def __reduce__(self) -> tuple[Any, ...]:
        return DistQueue, (self._actor,)

    @classmethod
    def create(
        cls, tasks: Iterable[str], options: QueueOptions | None = None, *, name: str | None = None, **given: Any
    ) -> DistQueue:
        """Starts the queue: its actor on this node, a shard on every node. It ends with `close`, or when the process
        that created it ends. `options`, or its fields as arguments; `name`: for `connect` and `python -m distqueue`.
        With a journal that is there already, goes on from it. ray.init() has been called.

        ValueError names the option that is wrong, or the journal that another queue has open.
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
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        )
        queue = cls(actor_class.remote(name or "", tasks, options, node))
        try:
            queue._run(queue._call("start"))
        except ValueError:
            ray.kill(queue._actor)
            raise
        return queue

    @classmethod
    def connect(cls, name: str) -> DistQueue:
        """The queue created under `name` in this Ray cluster. ValueError if there is none."""
        return cls(ray.get_actor(name, namespace=NAMESPACE))

    def put(
        self, batch: PackedBatch, groups: Sequence[str] = (), versions: Sequence[int | Span] = ()
    ) -> tuple[str, ...]:
        """See `LocalQueue.put`; returns when the queue has its own copy, so the batch stays the caller's."""
        return self._run(self._put(batch.labelled(groups, versions)))

    async def put_async(
        self, batch: PackedBatch, groups: Sequence[str] = (), versions: Sequence[int | Span] = ()
    ) -> tuple[str, ...]:
        """`put` for a coroutine."""
        return await self._run_async(self._put(batch.labelled(groups, versions)))

    def get(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        min_version: int | None = None,
        share: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """See `LocalQueue.get`."""
        want = Want(task, tuple(columns), count, token_budget, whole_groups, min_version)
        return self._run(self._get(want, share, timeout_s))

    async def get_async(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        min_version: int | None = None,
        share: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """`get` for a coroutine. What a get cancelled at the last moment had taken comes back when its lease ends."""
        want = Want(task, tuple(columns), count, token_budget, whole_groups, min_version)
        return await self._run_async(self._get(want, share, timeout_s))

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """See `LocalQueue.read`."""
        return self._run(self._read(tuple(ids), tuple(columns)))

    async def read_async(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """`read` for a coroutine."""
        return await self._run_async(self._read(tuple(ids), tuple(columns)))

    def ack(self, task: str, ids: Iterable[str]) -> None:
        """See `LocalQueue.ack`."""
        self._run(self._call("call", "ack", task, tuple(ids)))

    async def ack_async(self, task: str, ids: Iterable[str]) -> None:
        """`ack` for a coroutine."""
        await self._run_async(self._call("call", "ack", task, tuple(ids)))

    def drop(self, ids: Iterable[str], reason: str) -> None:
        """See `LocalQueue.drop`."""
        self._run(self._call("call", "drop", tuple(ids), reason))

    def renew(self, task: str, ids: Iterable[str]) -> None:
        """See `LocalQueue.renew`."""
        self._run(self._call("call", "renew", task, tuple(ids)))

    def give_back(self, task: str, ids: Iterable[str]) -> None:
        """See `LocalQueue.give_back`."""
        self._run(self._call("call", "give_back", task, tuple(ids)))

    def seal(self) -> None:
        """See `LocalQueue.seal`."""
        self._run(self._call("call", "seal"))

    def stats(self) -> dict[str, float]:
        """See `LocalQueue.stats`."""
        return self._run(self._call("stats"))

    def state(self) -> dict[str, Any]:
        """See `LocalQueue.state`."""
        return json.loads(self._run(self._call("state")))

    def add_shard(self, node: str) -> str:
        """Starts a shard on a node (its Ray id) that has joined; returns the shard's name."""
        return self._run(self._call("add_shard", node))

    def remove_shard(self, node: str) -> None:
        """Moves what a node's shard holds to the others and ends it. ValueError: no such shard, or the last one."""
        self._run(self._call("remove_shard", node))

    def close(self) -> None:
        """Ends the queue and its processes; whoever waits, and every later call, gets QueueClosed. A journal stays."""
        try:
            self._run(self._call("close"))
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
        while True:
            number, path, size, shard, home, durable = yield from self._reserve(message, contents.nbytes)
            try:
                if home == self._here():
                    self._write(number, path, size, contents, durable)
                else:
                    header, frames = to_wire(batch.columns)
                    actor = yield from self._shard(shard)
                    yield partial(actor.write.remote, number, path, size, durable, header, *frames)
            except Exception:
                yield from self._call("cancel", number)
                raise
            self.traffic.sent_bytes += len(message) + contents.sent_bytes
            try:
                return (yield from self._call("commit", number, path))
            except LookupError:
                log.warning("a put of %d samples is repeated: the queue has given its reservation up", len(batch))

    def _reserve(self, message: bytes, nbytes: int) -> Steps[Any]:
        place = None
        while True:
            found = yield from self._call("reserve", message, self._here(), nbytes, place)
            if not isinstance(found, Turn):
                return found
            place = found.number
            log.warning("a put of %s bytes waits: %s", f"{nbytes:,}", found.why)

    def _write(self, number: int, path: str, size: int, contents: Contents, durable: bool) -> None:
        file = self._mapped.writable(path, size)
        file.write(number, contents)
        if durable:
            file.sync()

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

    def _fetch(self, delivery: Delivery, columns: Sequence[str]) -> Steps[PackedBatch]:
        """The payload of a delivery; samples that end meanwhile are left out."""
        too_old = delivery.too_old
        while True:
            try:
                sources, parts = yield from self._sources(delivery)
                found = gather_columns(parts, sources, self._buffers)
                self._mapped.check(place for place in delivery.places if self._is_here(place))
                self.traffic.received_bytes += sum(bare_bytes(column).nbytes for column in found.values())
                return PackedBatch(delivery.ids, found, delivery.groups, delivery.versions, too_old)
            except SegmentGone:  # moved, or written again because its samples have ended
                message = yield from self._call("locate", delivery.ids, tuple(columns), skip_ended=True)
                delivery = Delivery.from_bytes(message)
                if not delivery.ids:
                    return PackedBatch((), {})

    def _sources(self, delivery: Delivery) -> Steps[tuple[list[dict[str, Stretch]], list[Part]]]:
        """Where the columns lie in this process, and the delivery's parts as runs of that. What lies on other nodes is
        asked for first, each shard once."""
        for place in delivery.places:
            if place.shard not in self._shards:
                self._shards = yield from self._call("where")
        sources: list[dict[str, Stretch]] = [
            self._mapped.columns(place) if self._is_here(place) else {} for place in delivery.places
        ]
        parts = list(delivery.parts)
        elsewhere = sorted({place.shard for place in delivery.places if not self._is_here(place)})
        for shard in elsewhere:
            ours = np.array([place.shard == shard for place in delivery.places])
            asked = [Part(part.columns, part.runs[ours[part.runs[:, 0]]]) for part in delivery.parts]
            asked = [part for part in asked if len(part.runs)]
            actor = yield from self._shard(shard)
            places = [place for place, here in zip(delivery.places, ours.tolist(), strict=True) if here]
            try:
                answers = yield partial(actor.read.remote, places, [_renumbered(part, ours) for part in asked])
            except ActorGone:
                yield from self._call("shard_lost", shard)
                raise SegmentGone(f"shard {shard!r} is lost") from None
            by_columns = {part.columns: from_wire(*answer) for part, answer in zip(asked, answers, strict=True)}
            for i, part in enumerate(parts):
                if part.columns in by_columns:
                    parts[i] = Part(part.columns, _rerun(part.runs, ours, len(sources)))
                    sources.append(by_columns[part.columns])
        return sources, parts

    def _shard(self, name: str) -> Steps[Any]:
        if name not in self._shards:
            self._shards = yield from self._call("where")
        if name not in self._shards:
            raise SegmentGone(f"shard {name!r} has left")
        return self._shards[name][1]

    def _is_here(self, place: Place) -> bool:
        return self._shards[place.shard][0] == self._here()

    def _here(self) -> str:
        if not self._node:
                self._node = ray.get_runtime_context().get_node_id()
        return self._node

    # ---- driving steps

    def _run(self, steps: Steps[T]) -> T:
        driver = _Driver(steps)
        while driver.call is not None:
            ref = driver.call()
            with driver.answering(ref):
                driver.answer(ray.get(ref))
            time.sleep(driver.wait_s)
        return driver.result  # type: ignore[return-value]

    async def _run_async(self, steps: Steps[T]) -> T:
        driver = _Driver(steps)
        while driver.call is not None:
            ref = driver.call()
            with driver.answering(ref):
                driver.answer(await ref)
            await asyncio.sleep(driver.wait_s)
        return driver.result  # type: ignore[return-value]


class _Driver:
    """Where the steps of a call stand: `call` is the next one to make, None at the end."""

    def __init__(self, steps: Steps[Any]) -> None:
        self.steps, self.result, self.wait_s = steps, None, 0.0
        self.call: Callable[[], Any] | None = None
        self._unavailable_s: float | None = None
        self._go_on(lambda: next(steps))

    def answer(self, value: Any) -> None:
        self.wait_s, self._unavailable_s = 0.0, None
        self._go_on(lambda: self.steps.send(value))

    @contextmanager
    def answering(self, ref: Any) -> Iterator[None]:
        """What an actor raised is raised in the steps; a wait that is broken off here ends there, too."""
        try:
            yield
        except ray.exceptions.RayTaskError as error:
            self._throw(error.cause)
        except UNAVAILABLE as error:
            self._come_again(error)
        except GONE:
            self._throw(ActorGone("the queue's actor is gone: closed, killed, or its node lost"))
        except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
            ray.cancel(ref)
            self.steps.close()
            raise

    def _come_again(self, error: Exception) -> None:
        """The actor is being started anew: the same call once more, soon."""
        now_s = time.monotonic()
        if self._unavailable_s is None:
            self._unavailable_s = now_s
            log.warning("a process of the queue has died; waiting for it to be started anew")
        if now_s - self._unavailable_s > PATIENCE_S:
            self._throw(ActorGone(f"a process of the queue has not come back in {PATIENCE_S:.0f} s: {error}"))
        self.wait_s = RETRY_S

    def _throw(self, error: BaseException) -> None:
        self.wait_s = 0.0
        self._go_on(lambda: self.steps.throw(error))

    def _go_on(self, advance: Callable[[], Callable[[], Any]]) -> None:
        try:
            self.call = advance()
        except StopIteration as end:
            self.call, self.result = None, end.value


def _renumbered(part: Part, kept: np.ndarray) -> Part:
    """The part, its runs' sources numbered among those that are kept."""
    runs = part.runs.copy()
    runs[:, 0] = (np.cumsum(kept) - 1)[runs[:, 0]]
    return Part(part.columns, runs)


def _rerun(runs: np.ndarray, moved: np.ndarray, source: int) -> np.ndarray:
    """The same runs, where those of `moved` sources lie one after the other in a new one."""
    runs = runs.copy()
    here = moved[runs[:, 0]]
    sizes = runs[here, 2] - runs[here, 1]
    stops = np.cumsum(sizes)
    runs[here] = np.stack([np.full(len(sizes), source), stops - sizes, stops], axis=1)
    return runs
