"""The public interface of a queue, which `DistQueue` (across processes) and `LocalQueue` (in one process) share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec

from distqueue.core.queue import QueueCore
from distqueue.errors import LostSample
from distqueue.packed import PackedBatch
from distqueue.request import GetRequest
from distqueue.samples import Span

Params = ParamSpec("Params")

Change = Callable[Concatenate[QueueCore, Params], Any]
"""A method of `QueueCore` that changes the state without a payload; its last parameter is the time, `now_s`."""


class SampleQueue(ABC):
    """Store samples between the stages of training. Thread-safe.

    Every method raises QueueClosed once the queue is closed."""

    def put(
        self, batch: PackedBatch, groups: Sequence[str] = (), versions: Sequence[int | Span] = (), *, claim: str = ""
    ) -> tuple[str, ...]:
        """Create the batch's samples, or add its columns to samples that exist. Return the ids that were dropped
        before and therefore were not stored; waits while the queue is full.

        `groups` and `versions` (one policy version per sample, or those of its oldest and newest token) default to the
        batch's own. `LocalQueue` keeps the batch's buffers, which must not be written afterwards; `DistQueue` returns
        once it has its own copy.

        `claim`: a task to which the samples, which must exist, are leased until `ack`, whatever columns they hold: for
        a caller that knows its samples and need not read them.

        ValueError, with nothing changed: a column put twice or in another layout, a sample that is already done, a
        group that changes, a new sample after `seal`, more than max_rows or max_bytes at once; of a claim: a sample
        that was never put or has ended, or that the task holds or has acknowledged. SamplesLost, a ValueError, names
        those that were lost if these are all that is wrong with a claim.
        StorageFull, with nothing changed: there is no space for the payload."""
        return self._put(batch.labelled(groups, versions), claim)

    def get(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        lengths: Sequence[str] = (),
        partial: bool = False,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """Wait for a batch of samples that hold all `columns`, oldest first, and lease them to the caller until `ack`.

        The arguments are the fields of `GetRequest`, which documents them: `lengths` names further columns of which the
        batch has the tokens per sample only.

        TimeoutError names the missing columns and the number of samples that lack them. QueueDrained: the queue is
        sealed and the task has received everything. ValueError: a task that this queue does not have."""
        return self.fetch(GetRequest(task, columns, count, lengths=lengths, partial=partial, timeout_s=timeout_s))

    @abstractmethod
    def fetch(self, request: GetRequest, left: Future[None] | None = None) -> PackedBatch:
        """Serve a `get`. CancelledError, with nothing taken: `left` was done first; what a `DistQueue` had just handed
        out returns when its lease expires, at the latest."""

    @abstractmethod
    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """Copy columns of live samples, without a lease. ValueError names the sample and the column it lacks.
        SamplesLost, a ValueError, names those that were lost if these are all that is wrong."""

    def lost(self, first: int = 0) -> list[LostSample]:
        """Return the samples that have ended because their payload is damaged or gone, in the order in which this was
        noticed, from the one with index `first`."""
        return self._look(QueueCore.lost_since, first)

    def lengths(self, ids: Sequence[str], columns: Sequence[str]) -> dict[str, list[int]]:
        """Return the tokens of live samples by column, in the order of `ids`, without reading payload; 1 each for dense
        columns, text and metadata. ValueError names the sample and the column it lacks."""
        lengths = self._look(QueueCore.lengths, tuple(ids), tuple(columns))
        return dict(zip(columns, lengths.tolist(), strict=True))

    def holding(self, column: str) -> list[str]:
        """Return the ids of all live samples that hold a column, oldest first. Visits every sample: for recovery."""
        return self._look(QueueCore.holding, column)

    def ack(self, task: str, ids: Iterable[str]) -> None:
        """Acknowledge samples: they are never handed to `task` again, and are freed once every task has acknowledged
        them. Idempotent. ValueError: a sample that was never put, or never handed to `task`."""
        self._change(QueueCore.ack, task, tuple(ids))

    def drop(self, ids: Iterable[str], reason: str) -> None:
        """End samples as `dropped:<reason>` and free them; their groups continue without them."""
        self._change(QueueCore.drop, tuple(ids), reason)

    def lose(self, ids: Iterable[str], reason: str) -> None:
        """End samples as `lost:<reason>`, because their payload is gone; those that were never put, or have ended, are
        ignored."""
        self._change(QueueCore.lose_samples, tuple(ids), reason)

    def renew(self, task: str, ids: Iterable[str]) -> None:
        """Extend the leases of samples that `task` holds by another `lease_s`, from now."""
        self._change(QueueCore.renew, task, tuple(ids))

    def give_back(self, task: str, ids: Iterable[str]) -> None:
        """Release leases of `task` at once, for samples it will not work on; acknowledged samples stay acknowledged."""
        self._change(QueueCore.give_back, task, tuple(ids))

    def seal(self) -> None:
        """Accept no new samples: gets are served what remains, then raise QueueDrained."""
        self._change(QueueCore.seal)

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Report metrics: live samples, bytes held, how samples ended; per task its depth (samples neither leased nor
        acknowledged), leased samples, waiting readers, redeliveries, and the age of its oldest sample in seconds."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Report which readers and writers wait for what, and for how long, as JSON-able data."""

    @abstractmethod
    def close(self) -> None:
        """End the queue and free its memory: waiting calls and every later one raise QueueClosed. A journal stays."""

    @abstractmethod
    def _put(self, batch: PackedBatch, claim: str) -> tuple[str, ...]: ...

    @abstractmethod
    def _change(self, change: Change[...], *args: Any) -> None:
        """Apply a change to the core, with the current time as its last argument."""

    @abstractmethod
    def _look(self, look: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the core that changes nothing."""
