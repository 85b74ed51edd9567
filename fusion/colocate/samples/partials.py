"""Samples that were suspended: what they have so far waits in the queue, until an engine goes on with them.

    engine ─► Output(abort or chunk) ── park ─► row `<id>~<tokens>` in the queue: partial_* columns, by nobody's task
                                                  │
    engine ◄─ Request(response=…) ◄─ restore ─────┤            the sample's row proper comes when it ends, with the
    engine ─ ends ─► Output ─ merge ──────────────┴─► queue    tokens, logprobs and versions of all its parts

Nothing but the queue holds them, so any engine may go on, and a checkpoint of the queue has them. Their KV, where it is
kept, stays with the engine that made it (`fusion.inference.parked`); `kv_rank` leads them back to it.

Invariants: a sample has at most one such row, the latest, but for the moment in which a newer one is put beside it; it
is dropped by whoever put what replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from distqueue import PackedBatch
from fusion.inference import Output, Request

COLUMNS = ("partial_response", "partial_logprobs", "partial_versions")
RESUMED = "resumed"


class Store(Protocol):
    """The part of the queue's face that is used here."""

    def put(self, batch: PackedBatch) -> Any: ...

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch: ...

    def drop(self, ids: Iterable[str], reason: str) -> None: ...


@dataclass(frozen=True)
class Suspended:
    """What the controller hears of a sample that was suspended. ``earlier``: its row in the queue, "" where it has no
    token yet; ``versions``: policy versions of its oldest and newest token; ``kv_rank``: the attention rank of the
    engine at which its KV is (`Output.kv_rank`), None: it is gone."""

    id: str
    generated: int
    earlier: str
    versions: tuple[int, int] | None
    kv_rank: int | None = None


def restore(requests: Sequence[Request], queue: Store) -> list[Request]:
    """Requests that name an `earlier` row go on behind its tokens."""
    rows = [request.earlier for request in requests if request.earlier]
    if not rows:
        return list(requests)
    batch = queue.read(rows, COLUMNS[:1])
    tokens = {row: tuple(batch[COLUMNS[0]][i].tolist()) for i, row in enumerate(batch.ids)}
    return [replace(one, response=tokens[one.earlier]) if one.earlier else one for one in requests]


def merge(outputs: Sequence[Output], queue: Store) -> list[Output]:
    """Outputs with what was generated before them in front."""
    rows = [output.earlier for output in outputs if output.earlier]
    if not rows:
        return list(outputs)
    batch = queue.read(rows, COLUMNS)
    parts = {id: [batch[name][i].tolist() for name in COLUMNS] for i, id in enumerate(batch.ids)}
    merged = []
    for output in outputs:
        if output.earlier:
            tokens, logprobs, versions = parts[output.earlier]
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


def forget(outputs: Sequence[Output], queue: Store) -> None:
    """The rows that these outputs, which are in the queue by now, have replaced."""
    rows = [output.earlier for output in outputs if output.earlier]
    if rows:
        queue.drop(rows, RESUMED)


def park(outputs: Sequence[Output], queue: Store) -> list[Suspended]:
    """Puts what was aborted where it can be gone on with."""
    longer = merge([output for output in outputs if output.tokens], queue)
    names = {output.request_id: f"{output.request_id}~{len(output.tokens)}" for output in longer}
    if longer:
        rows = {
            "partial_response": [torch.tensor(one.tokens, dtype=torch.int64) for one in longer],
            "partial_logprobs": [torch.tensor(one.logprobs, dtype=torch.float32) for one in longer],
            "partial_versions": [torch.tensor(one.versions, dtype=torch.int32) for one in longer],
        }
        queue.put(PackedBatch.from_samples([names[one.request_id] for one in longer], rows))
        forget(longer, queue)
    spans = {one.request_id: (min(one.versions), max(one.versions)) for one in longer}
    return [
        Suspended(
            one.request_id,
            len(one.before) + len(one.tokens),
            names.get(one.request_id, one.earlier),
            spans.get(one.request_id),
            one.kv_rank,
        )
        for one in outputs
    ]
