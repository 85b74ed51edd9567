"""Read a batch from the queue while the card still computes on the batch before it.

    begin ─► thread: queue.read ─► batch, or its error ─► read: returned or raised to the caller that asks for it

Invariants: `read` returns, and raises, what the queue's `read` does; at most one batch is held ahead; a batch that was
begun is delivered to the next `read` only, and only if that asks for the same samples and columns."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from distqueue import PackedBatch
from distqueue.hierarchy.reader import Readable


class ReadAhead:
    """A queue's `read`, of which one may be begun before it is called. One thread uses it."""

    def __init__(self, queue: Readable):
        self._queue = queue
        self._thread = ThreadPoolExecutor(1, "read ahead")
        self._begun: tuple[tuple[str, ...], tuple[str, ...], Future[PackedBatch]] | None = None
        """Ids and columns of the batch that is held ahead, and the batch"""

    def begin(self, ids: Sequence[str], columns: Sequence[str]) -> None:
        self._begun = tuple(ids), tuple(columns), self._thread.submit(self._queue.read, ids, columns)

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """Return these samples, as the queue's `read` does."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[:2] == (tuple(ids), tuple(columns)):
            return begun[2].result()
        return self._queue.read(ids, columns)
