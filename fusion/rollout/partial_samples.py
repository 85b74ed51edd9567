"""Samples that were suspended: what they have so far waits in the queue, until an engine goes on with them.

    engine ─► Output(abort or chunk) ─── put ─► row `<id>~<tokens>` in the queue: partial_* columns, by nobody's task
                                                  │
    engine ◄─ Request(response=…) ◄─ restore ─────┤            the sample's row proper comes when it ends, with the
    engine ─ ends ─► Output ─── put ──────────────┴─► queue    tokens, logprobs and versions of all its parts

Nothing but the queue holds them, so any engine may go on, and a checkpoint of the queue has them. Their KV, where it is
kept, stays with the engine that made it (`fusion.inference.parked`); `kv_rank` leads them back to it.

Invariants: a sample has at most one such row, the latest, but for the moment in which a newer one is put beside it; it
is dropped by whoever put what replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from distqueue import PackedBatch
from fusion.inference import Output, Request
from fusion.rollout.packing import pack_outputs
from fusion.rollout.types import SuspendedSample

COLUMNS = ("partial_response", "partial_logprobs", "partial_versions")
RESUMED = "resumed"


class SampleStore(Protocol):
    """The part of the queue's face that is used here."""

    def put(self, batch: PackedBatch) -> Any: ...

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch: ...

    def drop(self, ids: Iterable[str], reason: str) -> None: ...


class PartialSamples:
    """Of one card. ``remembers``: it sees the end of every request that it restores, and so need not read again what it
    has read."""

    def __init__(self, queue: SampleStore, remembers: bool = False):
        self._queue, self._remembers = queue, remembers
        self._read: dict[str, list[torch.Tensor]] = {}
        """By row, what its columns hold"""

    def restore(self, requests: Sequence[Request]) -> list[Request]:
        """Requests that name an `earlier` row go on behind its tokens."""
        rows = [request.earlier for request in requests if request.earlier]
        found = self._parts(rows, COLUMNS if self._remembers else COLUMNS[:1])
        if self._remembers:
            self._read |= {row: [column.clone() for column in columns] for row, columns in found.items()}
        return [
            replace(one, response=tuple(found[one.earlier][0].tolist())) if one.earlier else one for one in requests
        ]

    def put(self, ended: Sequence[Output], unfinished: Sequence[Output] = ()) -> list[SuspendedSample]:
        """Puts what has ended, with what was generated before in front, to the queue, and what has not where it can be
        gone on with; what both replace leaves. Returns the unfinished ones."""
        longer = [output for output in unfinished if output.tokens]
        for output in unfinished:
            if not output.tokens:
                self._read.pop(output.earlier, None)
        whole = self._merge([*ended, *longer])
        if ended:
            self._queue.put(pack_outputs(whole[: len(ended)]))
        parked = whole[len(ended) :]
        names = {output.request_id: f"{output.request_id}~{len(output.tokens)}" for output in parked}
        if parked:
            rows = {
                "partial_response": [torch.tensor(one.tokens, dtype=torch.int64) for one in parked],
                "partial_logprobs": [torch.tensor(one.logprobs, dtype=torch.float32) for one in parked],
                "partial_versions": [torch.tensor(one.versions, dtype=torch.int32) for one in parked],
            }
            self._queue.put(PackedBatch.from_samples(list(names.values()), rows))
        if replaced := [output.earlier for output in (*ended, *longer) if output.earlier]:
            self._queue.drop(replaced, RESUMED)
        spans = {one.request_id: (min(one.versions), max(one.versions)) for one in parked}
        return [
            SuspendedSample(
                one.request_id,
                len(one.before) + len(one.tokens),
                names.get(one.request_id, one.earlier),
                spans.get(one.request_id),
                one.kv_rank,
            )
            for one in unfinished
        ]

    def _merge(self, outputs: Sequence[Output]) -> list[Output]:
        """With what was generated before them in front."""
        rows = [output.earlier for output in outputs if output.earlier]
        parts = {row: self._read.pop(row) for row in rows if row in self._read}
        parts |= self._parts([row for row in rows if row not in parts], COLUMNS)
        merged = []
        for output in outputs:
            if output.earlier:
                tokens, logprobs, versions = (column.tolist() for column in parts[output.earlier])
                assert tuple(tokens) == output.before, f"sample {output.request_id!r} went on from other tokens"
                output = replace(
                    output,
                    tokens=tokens + output.tokens,
                    logprobs=logprobs + output.logprobs,
                    versions=versions + output.versions,
                    before=(),
                )
            merged.append(output)
        return merged

    def _parts(self, rows: Sequence[str], columns: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        if not rows:
            return {}
        batch = self._queue.read(rows, columns)
        return {id: [batch[name][i] for name in columns] for i, id in enumerate(batch.ids)}
