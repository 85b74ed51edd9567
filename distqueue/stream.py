"""A queue as a data loader for any trainer: one batch after the other, each acknowledged when the next is requested.

    for batch in stream(queue, "train", ["tokens", "reward"], count=512): ...
    loader = torch.utils.data.DataLoader(QueueDataset(queue, "train", ["tokens"], token_budget=65536), batch_size=None)

The next batch is fetched while the current one is being processed. Requesting the next batch acknowledges the current
one; a loop that is left before that returns its last batch, and what was prefetched, to the queue at once; that of a
process that dies returns when the leases expire. So a lease must outlast `ahead` + 1 steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset

from distqueue.core import QueueClosed, QueueDrained
from distqueue.interface import SampleQueue
from distqueue.packed import PackedBatch
from distqueue.request import GetRequest


def stream(
    queue: SampleQueue, task: str, columns: Sequence[str], *, ahead: int = 1, **options: Any
) -> Generator[PackedBatch, None, None]:
    """Iterate over leased batches until the queue is sealed and drained.

    `options`: the other fields of `GetRequest`. `ahead`: batches prefetched beyond the current one; 0: none.

    QueueClosed: the queue was closed before it was drained. TimeoutError: as `get`. ValueError: a request that can
    never be served.

    >>> import torch
    >>> from distqueue import LocalQueue, PackedBatch, stream
    >>> queue = LocalQueue(["train"])
    >>> queue.put(PackedBatch.from_samples(["a", "b", "c"], {"reward": torch.tensor([1.0, 0.0, 0.5])}))
    ()
    >>> queue.seal()
    >>> [batch["reward"].buffer.tolist() for batch in stream(queue, "train", ["reward"], count=2)]
    [[1.0, 0.0], [0.5]]
    >>> queue.stats()["distqueue/ended/done"]
    3
    """
    return _batches(queue, GetRequest(task, columns, **options), ahead)


class QueueDataset(IterableDataset):
    """`stream` for `torch.utils.data.DataLoader(..., batch_size=None)`; arguments as for `stream`.

    >>> import torch
    >>> from distqueue import LocalQueue, PackedBatch, QueueDataset
    >>> queue = LocalQueue(["train"])
    >>> queue.put(PackedBatch.from_samples(["a", "b"], {"reward": torch.tensor([1.0, 0.0])}))
    ()
    >>> queue.seal()
    >>> loader = torch.utils.data.DataLoader(QueueDataset(queue, "train", ["reward"], count=1), batch_size=None)
    >>> [batch.ids for batch in loader]
    [('a',), ('b',)]
    """

    def __init__(
        self, queue: SampleQueue, task: str, columns: Sequence[str], *, ahead: int = 1, **options: Any
    ) -> None:
        self._queue, self._ahead = queue, ahead
        self._request = GetRequest(task, columns, **options)

    def __iter__(self) -> Iterator[PackedBatch]:
        return _batches(self._queue, self._request, self._ahead)


def _batches(queue: SampleQueue, request: GetRequest, ahead: int) -> Generator[PackedBatch, None, None]:
    fetched: deque[Future[PackedBatch]] = deque()
    held: list[PackedBatch] = []
    """Leased and not acknowledged"""

    async def fetch() -> PackedBatch:
        batch = await queue.get_async(**request.arguments())
        held.append(batch)
        return batch

    try:
        with _event_loop() as loop:
            while True:
                while len(fetched) < max(1, ahead):
                    fetched.append(asyncio.run_coroutine_threadsafe(fetch(), loop))
                try:
                    current = fetched.popleft().result()
                except QueueDrained:
                    return
                if ahead:
                    fetched.append(asyncio.run_coroutine_threadsafe(fetch(), loop))
                yield current
                queue.ack(request.task, current.ids)
                held.remove(current)
    finally:
        _give_back(queue, request.task, held)


def _give_back(queue: SampleQueue, task: str, held: list[PackedBatch]) -> None:
    try:
        for batch in held:
            queue.give_back(task, batch.ids)
    except QueueClosed:  # its leases have ended with it
        pass


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a separate thread; on exit, cancel its waiting tasks."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="stream", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(timeout=10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_others() -> None:
    """Cancel all other tasks of this loop and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=5)
