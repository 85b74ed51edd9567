"""Record HBM by owner in each phase, as counted by the device allocator.

A worker records `Device.memory_by_owner()` and `Device.memory().peak_allocated` at the end of each phase; the
controller merges the cards' ledgers. Every value is the maximum over all cards, since the fullest card runs out of
memory first; owners reach their maximum at different times, so their sum may exceed the peak. The capacity is that of
the smallest card."""

from collections.abc import Iterable, Mapping

MIB = 2**20
GIB = 2**30

CAPACITY = "memory/capacity_mib"
"""Metric of the capacity of the smallest card."""


class MemoryLedger:
    """Highest bytes by (phase, owner) and the peak of each phase, on the fullest card. `capacity`: bytes of one card;
    None: not recorded."""

    def __init__(self) -> None:
        self.by_owner: dict[str, dict[str, int]] = {}
        self.peak: dict[str, int] = {}
        self.capacity: int | None = None

    def record(self, phase: str, by_owner: Mapping[str, int], peak: int, *, capacity: int | None = None) -> None:
        """Record one card's memory in one phase: bytes by owner, the allocator's peak, and what the card has in all."""
        owners = self.by_owner.setdefault(phase, {})
        for owner, held in by_owner.items():
            owners[owner] = max(owners.get(owner, 0), int(held))
        self.peak[phase] = max(self.peak.get(phase, 0), int(peak))
        self._note_capacity(capacity)

    def merge(self, other: "MemoryLedger") -> "MemoryLedger":
        """Merge another card's (or step's) ledger into this one. Return self."""
        for phase, peak in other.peak.items():
            self.record(phase, other.by_owner[phase], peak)
        self._note_capacity(other.capacity)
        return self

    @classmethod
    def merged(cls, ledgers: "Iterable[MemoryLedger]") -> "MemoryLedger":
        ledger = cls()
        for other in ledgers:
            ledger.merge(other)
        return ledger

    @property
    def phases(self) -> list[str]:
        return list(self.peak)

    @property
    def owners(self) -> list[str]:
        """Return the owners in the order in which they were first recorded."""
        return list(dict.fromkeys(owner for owners in self.by_owner.values() for owner in owners))

    def metrics(self) -> dict[str, float]:
        """Return `memory/<phase>/<owner>_mib`, `memory/<phase>/peak_mib`, `memory/capacity_mib`, and
        `perf/max_memory_allocated_gb` over all phases."""
        figures: dict[str, float] = {}
        for phase, peak in self.peak.items():
            for owner, held in self.by_owner[phase].items():
                figures[f"memory/{phase}/{owner}_mib"] = held / MIB
            figures[f"memory/{phase}/peak_mib"] = peak / MIB
        if self.peak:
            figures["perf/max_memory_allocated_gb"] = max(self.peak.values()) / GIB
        if self.capacity is not None:
            figures[CAPACITY] = self.capacity / MIB
        return figures

    @classmethod
    def from_metrics(cls, figures: Mapping[str, float | None]) -> "MemoryLedger":
        """Rebuild the ledger from a row of metrics.jsonl."""
        ledger = cls()
        if (capacity := figures.get(CAPACITY)) is not None:
            ledger._note_capacity(round(capacity * MIB))
        for name, value in figures.items():
            area, _, rest = name.partition("/")
            phase, _, owner = rest.rpartition("/")
            if area != "memory" or not phase or not owner.endswith("_mib") or value is None:
                continue
            held, owner = round(value * MIB), owner.removesuffix("_mib")
            ledger.record(phase, {} if owner == "peak" else {owner: held}, held if owner == "peak" else 0)
        return ledger

    def _note_capacity(self, capacity: int | None) -> None:
        known = [nbytes for nbytes in (self.capacity, capacity) if nbytes is not None]
        self.capacity = min(known, default=None)


def human_bytes(count: float) -> str:
    """Format bytes in at most six characters, in binary units: `0`, `512`, `1.50K`, `12.3M`, `64.0G`."""
    if count < 1024:
        return f"{count:.0f}"
    units = "KMGTP"
    power = 0
    value = count / 1024
    while value >= 999.5 and power < len(units) - 1:
        value /= 1024
        power += 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}{units[power]}"
