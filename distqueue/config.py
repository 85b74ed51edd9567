"""How a queue is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LEASE_S = 900.0


@dataclass(frozen=True)
class QueueOptions:
    """What `DistQueue.create` takes beside the tasks. `validate` names the key that is wrong."""

    group_size: int | None = None
    """Members of every group, needed for `whole_groups`."""
    lease_s: float = LEASE_S
    """What a reader got and has not acknowledged (or renewed) within this is handed out again."""
    durability: str = "memory"
    """`memory`: samples live in shared memory and end with the queue's actor. `journal`: what was acknowledged is on
    disk, and a queue created anew on the same folder goes on."""
    journal: str | None = None
    """Folder of the journal and its segments, the same path on every node."""
    max_rows: int | None = None
    """Samples the queue holds; a put of new ones waits for room. None: no bound."""
    max_bytes: int | None = None
    """Bytes a shard holds; likewise. None: half of what is free where its segments lie."""
    spill: str | None = None
    """Folder on disk to which `memory` brings segments that a full shard has no room for. None: puts wait."""

    def validate(self) -> None:
        if self.durability not in ("memory", "journal"):
            raise ValueError(f"durability={self.durability!r}: expected 'memory' or 'journal'")
        if (self.durability == "journal") != (self.journal is not None):
            expected = "a folder" if self.durability == "journal" else "None; only durability='journal' has one"
            raise ValueError(f"journal={self.journal!r}: expected {expected}")
        if self.durability == "journal" and self.spill is not None:
            raise ValueError(f"spill={self.spill!r}: expected None; a journal's segments are on disk already")
        for key in ("max_rows", "max_bytes"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}={value}: expected a positive number or None")
        for key in ("journal", "spill"):
            value = getattr(self, key)
            if value is not None and not Path(value).is_absolute():
                raise ValueError(f"{key}={value!r}: expected an absolute path; shards are other processes")
