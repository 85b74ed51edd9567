"""A queue as a data loader for any trainer: one batch after the other, each acknowledged when the next is requested.

    for batch in stream(queue, "train", ["tokens", "reward"], count=512): ...
    loader = torch.utils.data.DataLoader(QueueDataset(queue, "train", ["tokens"], count=64), batch_size=None)

The next batch is fetched while the current one is being processed. Requesting the next batch acknowledges the current
one; a loop that is left before that returns its last batch, and what was prefetched, to the queue at once; that of a
process that dies returns when the leases expire. So a lease must outlast `ahead` + 1 steps."""

import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from torch.utils.data import IterableDataset

from distqueue.errors import QueueClosed, QueueDrained
from distqueue.interface import SampleQueue
from distqueue.packed import PackedBatch
from distqueue.request import GetRequest


def stream(
    queue: SampleQueue, task: str, columns: Sequence[str], *, ahead: int = 1, **options: Any
) -> Generator[PackedBatch, None, None]:
    """Iterate over leased batches until the queue is sealed and drained.

    `options`: the other fields of `GetRequest`. `ahead`: batches prefetched beyond the current one; 0: none.

    QueueClosed: the queue was closed before it was drained. TimeoutError: as `get`. ValueError: a request that can
    never be served."""
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
    fetched: SimpleQueue[PackedBatch | Exception] = SimpleQueue()
    held: list[PackedBatch] = []
    """Leased and not acknowledged"""
    wanted, left = threading.Semaphore(max(1, ahead)), Future[None]()

    def fetch() -> None:
        while wanted.acquire() and not left.done():
            try:
                batch = queue.fetch(request, left)
            except Exception as error:
                fetched.put(error)
                return
            held.append(batch)
            fetched.put(batch)

    fetcher = threading.Thread(target=fetch, name="stream", daemon=True)
    fetcher.start()
    try:
        while True:
            current = fetched.get()
            if isinstance(current, QueueDrained):
                return
            if isinstance(current, Exception):
                raise current
            if ahead:
                wanted.release()
            yield current
            queue.ack(request.task, current.ids)
            held.remove(current)
            if not ahead:
                wanted.release()
    finally:
        left.set_result(None)
        wanted.release()
        fetcher.join()
        with suppress(QueueClosed):  # its leases have ended with it
            for batch in held:
                queue.give_back(request.task, batch.ids)
