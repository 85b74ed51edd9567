"""What a stage of an engine reports to its scheduler: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SuspendedSample:
    """An unfinished sample that left its engine.

    Args:
        generated: response tokens so far, over all its chunks.
        earlier: id of its row in the queue (`partial_samples`), "" while it has no token.
        versions: policy versions of the oldest and the newest of its tokens; None if it gained none.
        kv_rank: the attention rank of the engine that holds its KV (`Output.kv_rank`); None: the KV is gone.
    """

    id: str
    generated: int
    earlier: str
    versions: tuple[int, int] | None
    kv_rank: int | None = None
