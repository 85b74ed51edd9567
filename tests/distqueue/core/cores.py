"""A queue's core driven by hand: what it answers, without a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distqueue import PackedBatch
from distqueue.core import QueueCore
from distqueue.messages import Put
from distqueue.samples import SampleTable, Selection
from distqueue.segments import Segment, ShardState

LEASE_S = 10.0


def new_core(*tasks: str, max_bytes: int = 1 << 40, max_rows: int | None = None) -> QueueCore:
    core = QueueCore(SampleTable(tasks or ("train",), LEASE_S), max_rows=max_rows, epoch="e")
    core.ledger.add_shard(ShardState("here", node="here", folder="/here", max_bytes=max_bytes))
    return core


def put_of(lengths: dict[str, int], column: str = "tokens", groups: Sequence[str] = (), version: int = -1) -> Put:
    """What a writer says of samples, by id, of so many tokens."""
    batch = PackedBatch.from_samples(
        list(lengths), {column: [torch.zeros(n, dtype=torch.int8) for n in lengths.values()]}
    )
    return Put.of(batch.labelled(groups, [] if version < 0 else [version] * len(batch)))


def ask_room(core: QueueCore, put: Put, nbytes: int = 100, now_s: float = 0.0) -> list[Any]:
    """What a writer is answered: [] as long as it waits."""
    answers: list[Any] = []
    core.ask_room(put, node="here", nbytes=nbytes, now_s=now_s, answer=answers.append)
    return answers


def store(core: QueueCore, put: Put, now_s: float = 0.0) -> Segment:
    (segment,) = ask_room(core, put, now_s=now_s)
    core.commit(segment.number, segment.path, now_s)
    return segment


def ask(core: QueueCore, selection: Selection, now_s: float = 0.0) -> list[Any]:
    """What a reader is answered: [] as long as it waits."""
    answers: list[Any] = []
    core.ask(selection, now_s=now_s, answer=answers.append)
    return answers


def numbered(count: int, first: int = 0) -> dict[str, int]:
    """Samples of very different lengths."""
    return {f"s{n}": 1 + n * 7 % 23 for n in range(first, first + count)}


def select(
    count: int | None = None, task: str = "train", columns: Sequence[str] = ("tokens",), **more: Any
) -> Selection:
    return Selection(task, tuple(columns), count, **more)
