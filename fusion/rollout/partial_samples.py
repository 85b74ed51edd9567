"""Suspended samples: what they have so far waits in the queue until an engine resumes them.

    engine ─► Output(abort or chunk) ─── put ─► row `<id>~<tokens>` in the queue: partial_* columns, read by no task
                                                  │
    engine ◄─ Request(response=…) ◄─ restore ─────┤            the sample's own row is put when it finishes, with the
    engine ─ finishes ─► Output ─── put ──────────┴─► queue    tokens, logprobs and versions of all its parts

Nothing but the queue holds them, so any engine may resume them, and a checkpoint of the queue contains them. Their KV,
where it is kept, stays with the engine that computed it (`fusion.inference.parked`), to which `kv_rank` leads them
back, or is in the machine's pool (`fusion.inference.pooled`).

If the queue has lost what a sample has so far, the sample cannot be completed: it ends as lost, too.

Invariants: a sample has at most one such row, the latest, except while a newer one is being put beside it; a row is
dropped by the card that put its replacement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from distqueue import PackedBatch, SamplesLost
from fusion.inference import Output, Request
from fusion.rollout.packing import KEPT, GeneratedNames, generated_columns, pack_outputs
from fusion.rollout.types import SuspendedSample, row_of

PARTIAL = GeneratedNames(
    "partial_response",
    "partial_logprobs",
    "partial_versions",
    kept=("partial_kept_counts", "partial_kept_ids"),
    routing="partial_routing",
)
COLUMNS = PARTIAL.tokens, PARTIAL.logprobs, PARTIAL.versions
RESUMED = "resumed"
"""Why a partial row is dropped: a newer row, or the finished sample, replaces it"""

LOST_PARTS = "earlier tokens"
"""Why a sample is lost that could not be resumed or completed"""

log = logging.getLogger(__name__)


class SampleStore(Protocol):
    """The part of the queue's interface that a card uses."""

    def put(self, batch: PackedBatch) -> Any: ...

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch: ...

    def drop(self, ids: Iterable[str], reason: str) -> None: ...

    def lose(self, ids: Iterable[str], reason: str) -> None: ...


class PartialSamples:
    """The suspended samples of one card.

    Args:
        caches: keep in memory what `restore` read, for `put`. Only where this card sees the end of every request that
            it restores: another card's would never be freed.
        routing: outputs have their routing.
        kept: outputs have their kept ids.
        detokenize: gives finished responses their text; None: they get none.
    """

    def __init__(
        self,
        queue: SampleStore,
        caches: bool = False,
        routing: bool = False,
        kept: bool = False,
        detokenize: Callable[[Sequence[int]], str] | None = None,
    ):
        self._queue, self._caches, self._detokenize = queue, caches, detokenize
        self._columns = (*COLUMNS, *(PARTIAL.kept if kept else ()), *([PARTIAL.routing] if routing else ()))
        self._cached: dict[str, dict[str, torch.Tensor]] = {}
        """Columns by row and name"""

    def restore(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests, those that name an `earlier` row with its tokens as their response; without those whose
        row is lost."""
        rows = [request.earlier for request in requests if request.earlier]
        columns_by_row = self._read(rows, self._columns if self._caches else COLUMNS[:1])
        if self._caches:
            self._cached |= {
                row: {name: column.clone() for name, column in columns.items()}
                for row, columns in columns_by_row.items()
            }
        lost = [one for one in requests if one.earlier and one.earlier not in columns_by_row]
        self._lose([one.id for one in lost], [one.group for one in lost])
        return [
            replace(request, response=tuple(columns_by_row[request.earlier][COLUMNS[0]].tolist()))
            if request.earlier
            else request
            for request in requests
            if not request.earlier or request.earlier in columns_by_row
        ]

    def put(self, finished: Sequence[Output], suspended: Sequence[Output] = ()) -> list[SuspendedSample]:
        """Put finished samples to the queue, with what was generated before in front, and suspended ones as partial
        rows; drop the rows that both replace. Return the suspended ones, without those whose row is lost."""
        grown = [output for output in suspended if output.tokens]
        for output in suspended:
            if not output.tokens:
                self._cached.pop(output.earlier, None)
        columns_by_row = self._take_earlier([*finished, *grown])
        lost = [one for one in (*finished, *grown) if one.earlier and one.earlier not in columns_by_row]
        if lost:
            lost_ids = {one.request_id: one.group for one in lost}
            self._lose(list(lost_ids), list(lost_ids.values()))
            finished, grown, suspended = (
                [one for one in outputs if one.request_id not in lost_ids] for outputs in (finished, grown, suspended)
            )
        merged = _merge([*finished, *grown], columns_by_row)
        whole, partial = merged[: len(finished)], merged[len(finished) :]
        if whole:
            texts = [self._detokenize(output.tokens) for output in whole] if self._detokenize else []
            self._queue.put(pack_outputs(whole, texts))
        row_by_id = {output.request_id: row_of(output.request_id, len(output.tokens)) for output in partial}
        if partial:
            rows = list(row_by_id.values())
            self._queue.put(PackedBatch.from_samples(rows, generated_columns(partial, PARTIAL)))
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
                kv_tokens=output.kv_tokens,
            )
            for output in suspended
        ]

    def _take_earlier(self, outputs: Sequence[Output]) -> dict[str, dict[str, torch.Tensor]]:
        """Return the columns of the outputs' earlier rows, without those that are lost."""
        rows = [output.earlier for output in outputs if output.earlier]
        columns_by_row = {row: self._cached.pop(row) for row in rows if row in self._cached}
        return columns_by_row | self._read([row for row in rows if row not in columns_by_row], self._columns)

    def _read(self, rows: Sequence[str], columns: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
        """Return columns by row and name, without the rows that are lost."""
        while rows:
            try:
                batch = self._queue.read(rows, columns)
            except SamplesLost as error:
                log.error("suspended samples cannot be resumed: %s", str(error))
                gone = set(error.ids)
                rows = [row for row in rows if row not in gone]
                continue
            return {id: {name: batch[name][i] for name in columns} for i, id in enumerate(batch.ids)}
        return {}

    def _lose(self, ids: Sequence[str], groups: Sequence[str]) -> None:
        if ids:
            self._queue.put(PackedBatch(tuple(ids), {}, tuple(groups)))
            self._queue.lose(ids, LOST_PARTS)


def check_kept(holding: Callable[[str], Iterable[str]], truncates: bool) -> None:
    """Check that the rows of a restored queue have kept ids exactly where this run's sampling records them.

    Args:
        holding: returns the rows that hold a column.

    Raises:
        ValueError: rows that are not trained yet would be continued or trained with another distribution.
    """
    for column, kept in (("behaviour_logprobs", KEPT[0]), (PARTIAL.logprobs, PARTIAL.kept[0])):
        recorded = {*holding(kept)}
        differ = {*holding(column)} - recorded if truncates else recorded
        if differ:
            was = "without a record of the ids that were kept" if truncates else "with a filter"
            expected = "top_p=1, top_k=0 and min_p=0" if truncates else "top_p, top_k or min_p as before"
            raise ValueError(
                f"rollout.sampling.top_p: cannot resume: {len(differ)} samples that are not trained yet were sampled "
                f"{was}; expected rollout.sampling.{expected} until they are trained"
            )


def _merge(outputs: Sequence[Output], columns_by_row: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Output]:
    """Return the outputs with what was generated before them in front."""
    merged = []
    for output in outputs:
        if output.earlier:
            columns = columns_by_row[output.earlier]
            tokens, logprobs, versions = (columns[name].tolist() for name in COLUMNS)
            counts, ids = (columns[name] if name in columns else torch.empty(0) for name in PARTIAL.kept)
            assert tuple(tokens) == output.before, f"sample {output.request_id!r} resumed from other tokens"
            output = replace(
                output,
                tokens=tokens + output.tokens,
                logprobs=logprobs + output.logprobs,
                versions=versions + output.versions,
                before=(),
                routing=None if output.routing is None else torch.cat([columns[PARTIAL.routing], output.routing]),
                kept_counts=counts.tolist() + output.kept_counts,
                kept_ids=ids.numpy().tobytes() + output.kept_ids,
            )
        merged.append(output)
    return merged
