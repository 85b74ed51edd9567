"""How a queue is kept: `QueueConfig` is what a run's config says of it, `QueueOptions` all that a queue can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LEASE_S = 900.0


@dataclass
class QueueConfig:
    durability: str = "memory"
    """`memory`: samples live in shared memory and end with the queue's actor. `journal`: what was acknowledged is on
    disk, and goes on where the queue's processes were killed."""
    max_bytes: int | None = None
    """Bytes of samples a node holds; a put of new ones waits for room. null: half of what is free where they lie."""
    spill: str | None = None
    """Folder on disk to which `memory` brings samples that a full node has no room for; null: puts wait."""

    def validate(self, prefix: str = "queue.") -> None:
        if self.durability not in ("memory", "journal"):
            raise ValueError(f"{prefix}durability={self.durability!r}: expected 'memory' or 'journal'")
        if self.durability == "journal" and self.spill is not None:
            raise ValueError(f"{prefix}spill={self.spill!r}: expected null; a journal's samples are on disk already")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"{prefix}max_bytes={self.max_bytes}: expected a positive number or null")
        if self.spill is not None:
            check_absolute(f"{prefix}spill", self.spill)


@dataclass
class QueueOptions(QueueConfig):
    """What `DistQueue.create` takes beside the tasks."""

    group_size: int | None = None
    """Members of every group, needed for `whole_groups`."""
    lease_s: float = LEASE_S
    """What a reader got and has not acknowledged (or renewed) within this is handed out again."""
    journal: str | None = None
    """Folder of the journal and its segments, the same path on every node; with durability="journal" alone."""
    max_rows: int | None = None
    """Samples the queue holds; a put of new ones waits for room. None: no bound."""

    def validate(self, prefix: str = "") -> None:
        super().validate(prefix)
        if (self.durability == "journal") != (self.journal is not None):
            expected = "a folder" if self.durability == "journal" else "None; only durability='journal' has one"
            raise ValueError(f"{prefix}journal={self.journal!r}: expected {expected}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"{prefix}max_rows={self.max_rows}: expected a positive number or None")
        if self.journal is not None:
            check_absolute(f"{prefix}journal", self.journal)


def check_absolute(key: str, folder: str) -> None:
    if not Path(folder).is_absolute():
        raise ValueError(f"{key}={folder!r}: expected an absolute path; the queue's processes have other folders")
