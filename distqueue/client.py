"""The queue across processes: one Ray actor hosts a `LocalQueue`, and every process talks to it through a `DistQueue`.

Payload travels as bare buffers beside a small header (`wire.py`), which Ray moves through shared memory and does not
pickle. The actor is asynchronous: a get that waits is a suspended coroutine and delays nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from distqueue.packed import PackedBatch
from distqueue.queue import LEASE_S, LocalQueue, QueueClosed
from distqueue.table import SampleTable, Span
from distqueue.wire import Frames, from_wire, to_wire

MAX_CALLS = 10_000
"""Calls the actor holds at once, nearly all of them waiting; Ray's own default is 1,000"""


class QueueActor:
    """Runs inside Ray: the queue, with batches in their wire form."""

    def __init__(self, tasks: tuple[str, ...], group_size: int | None, lease_s: float) -> None:
        self._queue = LocalQueue(tasks, group_size=group_size, lease_s=lease_s)

    async def put(self, header: bytes, frames: Frames) -> tuple[str, ...]:
        return self._queue.put(from_wire(header, frames))

    async def get(self, *args: Any, **options: Any) -> tuple[bytes, Frames]:
        return to_wire(await self._queue.get_async(*args, **options))

    async def read(self, ids: Sequence[str], columns: Sequence[str]) -> tuple[bytes, Frames]:
        return to_wire(self._queue.read(ids, columns))

    async def call(self, method: str, *args: Any) -> Any:
        """ack, drop, stats, close: what carries no payload."""
        return getattr(self._queue, method)(*args)


class DistQueue:
    """A handle on a queue that lives in a Ray actor; the face is `LocalQueue`'s. Picklable: pass it to workers.

    Every method raises what `LocalQueue`'s would, and QueueClosed if the actor is gone.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def create(
        cls,
        tasks: Iterable[str],
        *,
        group_size: int | None = None,
        lease_s: float = LEASE_S,
        name: str | None = None,
    ) -> DistQueue:
        """Starts the queue on this node; it ends with `close`, or when the process that created it ends. `name`: for
        `connect`. Arguments as for `LocalQueue`; ray.init() has been called."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        tasks = tuple(tasks)
        SampleTable(tasks, lease_s, group_size)  # refuses wrong arguments here rather than in the actor
        actor_class = ray.remote(QueueActor).options(
            name=name,
            num_cpus=0,
            max_concurrency=MAX_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
        )
        return cls(actor_class.remote(tasks, group_size, lease_s))

    @classmethod
    def connect(cls, name: str) -> DistQueue:
        """The queue created under `name` in this Ray namespace. ValueError if there is none."""
        import ray

        return cls(ray.get_actor(name))

    def put(
        self, batch: PackedBatch, groups: Sequence[str] = (), versions: Sequence[int | Span] = ()
    ) -> tuple[str, ...]:
        """See `LocalQueue.put`; returns when the queue has its own copy, so the batch stays the caller's."""
        return self._wait(self._actor.put.remote(*to_wire(batch.labelled(groups, versions))))

    async def put_async(
        self, batch: PackedBatch, groups: Sequence[str] = (), versions: Sequence[int | Span] = ()
    ) -> tuple[str, ...]:
        """`put` for a coroutine."""
        return await self._wait_async(self._actor.put.remote(*to_wire(batch.labelled(groups, versions))))

    def get(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """See `LocalQueue.get`."""
        options = {"token_budget": token_budget, "whole_groups": whole_groups, "timeout_s": timeout_s}
        return from_wire(*self._wait(self._actor.get.remote(task, tuple(columns), count, **options)))

    async def get_async(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """`get` for a coroutine. What a get cancelled at the last moment had taken comes back when its lease ends."""
        options = {"token_budget": token_budget, "whole_groups": whole_groups, "timeout_s": timeout_s}
        return from_wire(*await self._wait_async(self._actor.get.remote(task, tuple(columns), count, **options)))

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """See `LocalQueue.read`."""
        return from_wire(*self._wait(self._actor.read.remote(tuple(ids), tuple(columns))))

    def ack(self, task: str, ids: Iterable[str]) -> None:
        """See `LocalQueue.ack`."""
        self._wait(self._actor.call.remote("ack", task, tuple(ids)))

    def drop(self, ids: Iterable[str], reason: str) -> None:
        """See `LocalQueue.drop`."""
        self._wait(self._actor.call.remote("drop", tuple(ids), reason))

    def stats(self) -> dict[str, float]:
        """See `LocalQueue.stats`."""
        return self._wait(self._actor.call.remote("stats"))

    def close(self) -> None:
        """Ends the queue and its process; whoever waits, and every later call, gets QueueClosed."""
        import ray

        try:
            self._wait(self._actor.call.remote("close"))
        except QueueClosed:
            return
        ray.kill(self._actor)

    def _wait(self, ref: Any) -> Any:
        import ray

        with _plain_errors(ref):
            return ray.get(ref)

    async def _wait_async(self, ref: Any) -> Any:
        with _plain_errors(ref):
            return await ref


@contextmanager
def _plain_errors(ref: Any) -> Iterator[None]:
    """Raises what the queue raised instead of Ray's wrapping of it; a wait that is broken off here ends there, too."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise QueueClosed("the queue's actor is gone: closed, killed, or its node lost") from error
    except BaseException:
        ray.cancel(ref)
        raise
