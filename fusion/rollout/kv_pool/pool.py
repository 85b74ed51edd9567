"""Decide which KV of a rank is in the machine's pool, in memory or on disk. Pure: no file, no clock.

    park ──► memory ──least recently parked, over the limit──► disk ──over the limit──► evicted
                └──── forget: continued, ended, or the weights changed ────┴──► removed

Each rank decides for what it has written. An entry is used once, when its request continues, so the least recently
used one is the least recently parked. Ranks with the same schedule are given the same events and sizes, so that they
decide alike; where a file fails on one of them only, the others' files are of no use and go the same way in the end.

Cost: O(1) for each event and command.

Invariants (tests/rollout/kv_pool/test_pool.py): after the commands of an event are executed, memory and disk hold at
most their limits; an entry is in one place; a parked request is there until it is forgotten, spilled or evicted, in the
order of parking, and not before a limit requires it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fusion.inference.config import KVPoolConfig

Place = Literal["memory", "disk"]


@dataclass(frozen=True)
class Write:
    """Write the KV of a request to a new file."""

    id: str
    place: Place


@dataclass(frozen=True)
class Spill:
    """Move a file from memory to disk."""

    id: str


@dataclass(frozen=True)
class Remove:
    """Remove a file. ``evicted``: to make room for others."""

    id: str
    place: Place
    evicted: bool = False


Command = Write | Spill | Remove


@dataclass(frozen=True)
class KVPoolSpec:
    """The pool of a run. ``run``: differs between any two starts of runs; ``spill``: a folder on disk, or None; limits
    in bytes of one rank, None: no limit; ``takes_suspended``: whether engines that are suspended park their KV."""

    run: str
    max_memory_bytes: int | None = None
    spill: str | None = None
    max_disk_bytes: int | None = None
    takes_suspended: bool = True

    @classmethod
    def of(cls, config: KVPoolConfig, *, run: str, takes_suspended: bool) -> KVPoolSpec:
        in_memory, on_disk = config.max_parked_mib, config.max_spilled_mib
        return cls(
            run=run,
            max_memory_bytes=None if in_memory is None else in_memory << 20,
            spill=config.spill,
            max_disk_bytes=None if on_disk is None else on_disk << 20,
            takes_suspended=takes_suspended,
        )


class PoolPlan:
    """Plan the files of one rank. ``max_memory_bytes``, ``max_disk_bytes``: None: no limit; 0: none."""

    def __init__(self, max_memory_bytes: int | None, max_disk_bytes: int | None = 0):
        self._configured: dict[Place, int | None] = {"memory": max_memory_bytes, "disk": max_disk_bytes}
        self._max_bytes = dict(self._configured)
        self._entries: dict[Place, OrderedDict[str, int]] = {"memory": OrderedDict(), "disk": OrderedDict()}
        """Request → bytes, least recently parked first"""
        self.held: dict[Place, int] = {"memory": 0, "disk": 0}
        """Bytes of the files in each"""

    def park(self, id: str, nbytes: int) -> list[Command]:
        """Plan the parking of a request's KV; without a `Write` it has no place. Commands are executed in order."""
        commands = self.forget([id])
        for place in ("memory", "disk"):
            if self._fits_alone(place, nbytes):
                commands += self._make_room(place, nbytes)
                self._add(place, id, nbytes)
                return [*commands, Write(id, place)]
        return commands

    def forget(self, ids: Iterable[str]) -> list[Command]:
        """Plan the removal of what these requests have parked; ids without any are ignored."""
        return [Remove(id, place) for id in ids if (place := self._drop(id))]

    def observe_gone(self, id: str) -> None:
        """Record that a file does not exist: another engine has taken it, or it could not be written."""
        self._drop(id)

    def observe_full(self, id: str) -> None:
        """Record that a file could not be written for lack of space: what its place holds without it is the limit
        until `clear`. Do nothing if it is to be removed by now."""
        if place := self._drop(id):
            self._max_bytes[place] = self.held[place]

    def clear(self) -> list[Command]:
        """Plan the removal of everything, and begin again with the limits of the construction."""
        self._max_bytes = dict(self._configured)
        return self.forget([id for entries in self._entries.values() for id in entries])

    def place_of(self, id: str) -> Place | None:
        return next((place for place, entries in self._entries.items() if id in entries), None)

    def _fits_alone(self, place: Place, nbytes: int) -> bool:
        limit = self._max_bytes[place]
        return limit is None or nbytes <= limit

    def _make_room(self, place: Place, nbytes: int) -> list[Command]:
        """Plan until ``nbytes`` fit: entries in memory go to disk if they fit there, else they are evicted."""
        limit, commands = self._max_bytes[place], list[Command]()
        while limit is not None and self.held[place] + nbytes > limit:
            id, size = next(iter(self._entries[place].items()))
            self._drop(id)
            if place == "memory" and self._fits_alone("disk", size):
                commands += self._make_room("disk", size)
                self._add("disk", id, size)
                commands.append(Spill(id))
            else:
                commands.append(Remove(id, place, evicted=True))
        return commands

    def _add(self, place: Place, id: str, nbytes: int) -> None:
        self._entries[place][id] = nbytes
        self.held[place] += nbytes

    def _drop(self, id: str) -> Place | None:
        place = self.place_of(id)
        if place is not None:
            self.held[place] -= self._entries[place].pop(id)
        return place
