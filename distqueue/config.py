"""Configure a queue: `QueueConfig` is the config group `queue`, `QueueOptions` the arguments of `DistQueue.create`.

Its checks are its own few lines, as this distribution imports nothing of the others."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEASE_S = 900.0
GRAIN = 1 << 12
"""Bytes of a page: the sizes of files are multiples of it"""
DURABILITIES = ("memory", "journal")


@dataclass
class QueueConfig:
    """Configure where samples are stored, and how much space they may use."""

    durability: str = "memory"
    """`memory`: samples are in shared memory and end with the queue's actor. `journal`: acknowledged samples are on
    disk and survive the crash of any process of the queue."""
    max_bytes: int | None = None
    """Maximum bytes of samples on a node, at least 4096; a put of new samples waits until there is space. null: half of
    the free space where they are stored."""
    spill: str | None = None
    """With durability=memory, folder on disk for samples that do not fit into a full node's memory; null: puts wait."""

    def validate(self, prefix: str = "queue.") -> None:
        """Check every value of the group.
        Raise ValueError: a value that is not accepted, by key; ``prefix`` is put before the key."""
        durable = self.durability in DURABILITIES
        _expect(durable, f"{prefix}durability", self.durability, expected=f"one of {', '.join(DURABILITIES)}")
        _expect_count(f"{prefix}max_bytes", self.max_bytes, at_least=GRAIN)
        if self.spill is not None:
            memory = self.durability == "memory"
            _expect(
                memory, f"{prefix}spill", self.spill, expected="null, as the samples of a journal are on disk already"
            )
            check_absolute(f"{prefix}spill", self.spill)
            folder = Path(self.spill).is_dir() or not Path(self.spill).exists()
            _expect(folder, f"{prefix}spill", self.spill, expected="a folder, which may not exist yet")


@dataclass
class QueueOptions(QueueConfig):
    """The arguments of `DistQueue.create` besides the tasks: the config group, and what a run derives from its
    others."""

    lease_s: float = LEASE_S
    """Seconds of a lease: a sample that a reader neither acknowledges nor renews in time is delivered again."""
    journal: str | None = None
    """Folder of the journal and its segments, the same path on every node; with durability="journal" only."""
    max_rows: int | None = None
    """Maximum number of samples in the queue; a put of new samples waits until there is space. None: no limit."""

    def validate(self, prefix: str = "") -> None:
        """Check every value. Raise ValueError: a value that is not accepted, by key."""
        super().validate(prefix)
        _expect_count(f"{prefix}max_rows", self.max_rows)
        seconds = isinstance(self.lease_s, (int, float)) and math.isfinite(self.lease_s) and self.lease_s > 0
        _expect(seconds, f"{prefix}lease_s", self.lease_s, expected="a number above 0")
        journals = self.durability == "journal"
        expected = "a folder" if journals else "None; only durability='journal' has one"
        _expect(journals == (self.journal is not None), f"{prefix}journal", self.journal, expected=expected)
        if self.journal is not None:
            check_absolute(f"{prefix}journal", self.journal)


def check_absolute(key: str, folder: str) -> None:
    """Check that a folder is an absolute path. Raise ValueError: ``folder`` is a relative path."""
    expected = "an absolute path, as the queue's processes have other working folders"
    _expect(Path(folder).is_absolute(), key, folder, expected=expected)


def _expect_count(key: str, value: Any, at_least: int = 1) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    expected = f"a whole number of at least {at_least}, or null"
    _expect(value is None or (whole and value >= at_least), key, value, expected=expected)


def _expect(holds: bool, key: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"{key}={value!r}: expected {expected}")
