"""A queue as the data loader of any trainer: batches one after the other, each acknowledged when the next is asked for.

    for batch in stream(queue, "train", ["tokens", "reward"], count=512): ...
    loader = torch.utils.data.DataLoader(QueueDataset(queue, "train", ["tokens"], token_budget=65536), batch_size=None)

The next batch is fetched while the present one is worked on. A batch counts as worked on when the next is asked for: a
loop that is left before gives its last batch back, and what was fetched ahead, at once; one that dies does when the
leases end. So a lease must outlast `ahead` + 1 steps.
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
from distqueue.packed import PackedBatch


def stream(
    queue: Any, task: str, columns: Sequence[str], *, ahead: int = 1, **want: Any
) -> Generator[PackedBatch, None, None]:
    """Yields leased batches of a `DistQueue` or `LocalQueue` until it is sealed and drained.

    `want`: as for `get`. `ahead`: batches fetched beyond the present one; 0: none. QueueClosed if the queue is closed
    before it was drained; TimeoutError as `get` says.
    """
    fetched: deque[Future[PackedBatch]] = deque()
    held: list[PackedBatch] = []
    """What was got and is not acknowledged"""

    async def fetch() -> PackedBatch:
        batch = await queue.get_async(task, columns, **want)
        held.append(batch)
        return batch

    try:
        with _event_loop() as loop:
            while True:
                while len(fetched) < max(1, ahead):
                    fetched.append(asyncio.run_coroutine_threadsafe(fetch(), loop))
                try:
                    present = fetched.popleft().result()
                except QueueDrained:
                    return
                if ahead:
                    fetched.append(asyncio.run_coroutine_threadsafe(fetch(), loop))
                yield present
                queue.ack(task, present.ids)
                held.remove(present)
    finally:
        _give_back(queue, task, held)


class QueueDataset(IterableDataset):
    """`stream` for `torch.utils.data.DataLoader(..., batch_size=None)`; arguments as for `stream`."""

    def __init__(self, queue: Any, task: str, columns: Sequence[str], **want: Any) -> None:
        self._arguments, self._want = (queue, task, tuple(columns)), want

    def __iter__(self) -> Iterator[PackedBatch]:
        return stream(*self._arguments, **self._want)


def _give_back(queue: Any, task: str, held: list[PackedBatch]) -> None:
    try:
        for batch in held:
            queue.give_back(task, batch.ids)
    except QueueClosed:  # and with it the leases
        pass


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in a thread of its own. What still waits in it is cancelled at the end."""
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
    """Returns when all else in this loop has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=5)
