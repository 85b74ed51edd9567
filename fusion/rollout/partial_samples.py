"""Suspended samples: what they have so far waits in the queue until an engine resumes them.

    engine ─► Output(abort or chunk) ─── put ─► row `<id>~<tokens>` in the queue: partial_* columns, read by no task
                                                  │
    engine ◄─ Request(response=…) ◄─ restore ─────┤            the sample's own row is put when it finishes, with the
    engine ─ finishes ─► Output ─── put ──────────┴─► queue    tokens, logprobs and versions of all its parts

Nothing but the queue holds them, so any engine may resume them, and a checkpoint of the queue contains them. Their KV,
where it is kept, stays with the engine that computed it (`fusion.inference.parked`); `kv_rank` leads them back to it.

Invariants: a sample has at most one such row, the latest, except while a newer one is being put beside it; a row is
dropped by the card that put its replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from distqueue import PackedBatch
from fusion.inference import Output, Request
from fusion.rollout.packing import pack_outputs
from fusion.rollout.types import SuspendedSample

COLUMNS = ("partial_response", "partial_logprobs", "partial_versions")
RESUMED = "resumed"
"""Why a partial row is dropped: a newer row, or the finished sample, replaces it"""


class SampleStore(Protocol):
    """The part of the queue's interface that a card uses."""

    def put(self, batch: PackedBatch) -> Any: ...

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch: ...

    def drop(self, ids: Iterable[str], reason: str) -> None: ...


class PartialSamples:
    """The suspended samples of one card.

    Args:
        caches: keep in memory what `restore` read, for `put`. Only where this card sees the end of every request that
            it restores: another card's would never be freed.
        detokenize: gives finished responses their text; None: they get none.
    """

    def __init__(
        self,
        queue: SampleStore,
        caches: bool = False,
        detokenize: Callable[[Sequence[int]], str] | None = None,
    ):
        self._queue, self._caches, self._detokenize = queue, caches, detokenize
        self._cached: dict[str, list[torch.Tensor]] = {}
        """Columns by row"""

    def restore(self, requests: Sequence[Request]) -> list[Request]:
        """Returns the requests, those that name an `earlier` row with its tokens as their response."""
        rows = [request.earlier for request in requests if request.earlier]
        columns_by_row = self._read(rows, COLUMNS if self._caches else COLUMNS[:1])
        if self._caches:
            self._cached |= {row: [column.clone() for column in columns] for row, columns in columns_by_row.items()}
        return [
            replace(request, response=tuple(columns_by_row[request.earlier][0].tolist()))
            if request.earlier
            else request
            for request in requests
        ]

    def put(self, finished: Sequence[Output], suspended: Sequence[Output] = ()) -> list[SuspendedSample]:
        """Puts finished samples to the queue, with what was generated before in front, and suspended ones as partial
        rows; drops the rows that both replace. Returns the suspended ones."""
        grown = [output for output in suspended if output.tokens]
        for output in suspended:
            if not output.tokens:
                self._cached.pop(output.earlier, None)
        merged = self._merge([*finished, *grown])
        whole, partial = merged[: len(finished)], merged[len(finished) :]
        if whole:
            texts = [self._detokenize(output.tokens) for output in whole] if self._detokenize else []
            self._queue.put(pack_outputs(whole, texts))
        row_by_id = {output.request_id: f"{output.request_id}~{len(output.tokens)}" for output in partial}
        if partial:
            self._queue.put(_pack_partial(partial, list(row_by_id.values())))
        if replaced := [output.earlier for output in (*finished, *grown) if output.earlier]:
            self._queue.drop(replaced, RESUMED)
        span_by_id = {output.request_id: (min(output.versions), max(output.versions)) for output in partial}
        return [
            SuspendedSample(
                id=output.request_id,
                generated=len(output.before) + len(output.tokens),
                earlier=row_by_id.get(output.request_id, output.earlier),
                versions=span_by_id.get(output.request_id),
                kv_rank=output.kv_rank,
            )
            for output in suspended
        ]

    def _merge(self, outputs: Sequence[Output]) -> list[Output]:
        """Returns the outputs with what was generated before them in front."""
        rows = [output.earlier for output in outputs if output.earlier]
        columns_by_row = {row: self._cached.pop(row) for row in rows if row in self._cached}
        columns_by_row |= self._read([row for row in rows if row not in columns_by_row], COLUMNS)
        merged = []
        for output in outputs:
            if output.earlier:
                tokens, logprobs, versions = (column.tolist() for column in columns_by_row[output.earlier])
                assert tuple(tokens) == output.before, f"sample {output.request_id!r} resumed from other tokens"
                output = replace(
                    output,
                    tokens=tokens + output.tokens,
                    logprobs=logprobs + output.logprobs,
                    versions=versions + output.versions,
                    before=(),
                )
            merged.append(output)
        return merged

    def _read(self, rows: Sequence[str], columns: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        if not rows:
            return {}
        batch = self._queue.read(rows, columns)
        return {id: [batch[name][i] for name in columns] for i, id in enumerate(batch.ids)}


def _pack_partial(outputs: Sequence[Output], rows: Sequence[str]) -> PackedBatch:
    return PackedBatch.from_samples(
        rows,
        {
            "partial_response": [torch.tensor(output.tokens, dtype=torch.int64) for output in outputs],
            "partial_logprobs": [torch.tensor(output.logprobs, dtype=torch.float32) for output in outputs],
            "partial_versions": [torch.tensor(output.versions, dtype=torch.int32) for output in outputs],
        },
    )
