"""Report the outcome of a switch: a report on every rank, with seconds by part, or an error with the failures of all
ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fusion.npu.failures import AbortedOnAllRanks, RankFailure

if TYPE_CHECKING:
    from fusion.npu import Device


@dataclass(frozen=True)
class SwitchReport:
    """Report what a switch did on this rank."""

    bytes_moved: int
    """Bytes received from other ranks, without checksums."""
    bytes_local: int
    """Bytes copied inside the rank, in the target's dtype. Units shared by both layouts are not copied."""
    seconds: float
    rounds: int
    peak_bytes: int
    """Peak bytes of weights, send and receive buffers, by the device's allocator."""
    peak_reserved: int
    """Peak bytes reserved by the allocator, minus the bytes allocated at the start by others than the two models;
    includes rounding and cached blocks."""
    bytes_hosted: int = 0
    """Bytes filled from this rank's host memory, in the target's dtype."""
    exchange: str = "none"
    """Exchange that was used: `shared`, `collective`, or `none` on a single rank."""
    received_bytes: dict[str, int] = field(default_factory=dict)
    """`bytes_moved` by the level of the link (`topology.LEVELS`)."""
    parts_s: dict[str, float] = field(default_factory=dict)
    """Seconds by part (`PARTS`); they add up to `seconds`. Overlapping work of a card's streams is counted in the part
    that waits for it."""


PARTS = ("prepare", "memory", "pack", "exchange", "unpack", "finish")
"""prepare: buffers and the agreement to start. memory: allocation and release of storage. pack: copies inside the rank,
and from sources to send buffers. exchange: waiting for other ranks. unpack: copies of other ranks' data to the target.
finish: the agreement that all ranks are done."""


class Stopwatch:
    """Measure the parts of a switch by events on the current stream, without waiting for it."""

    def __init__(self, device: Device):
        self._device = device
        self._events: list[Any] = []
        self._parts: list[str] = []

    def start(self) -> None:
        self._parts.clear()
        self._record()

    def mark(self, part: str) -> None:
        """Count the work queued since the last mark as ``part``."""
        self._parts.append(part)
        self._record()

    def seconds(self) -> dict[str, float]:
        """Return the seconds by part; call it after synchronising the card."""
        total = dict.fromkeys(PARTS, 0.0)
        for i, part in enumerate(self._parts):
            total[part] += self._events[i].elapsed_time(self._events[i + 1]) * 1e-3
        return total

    def _record(self) -> None:
        if len(self._parts) == len(self._events):
            self._events.append(self._device.event(timing=True))
        self._events[len(self._parts)].record()


@dataclass(frozen=True)
class SwitchFailure(RankFailure):
    """Report why a switch failed on a rank."""

    round: int = -1
    """Round of the failure; -1: before the first."""
    parameter: str = ""
    """Name of the parameter that was being moved; empty if none was."""

    @property
    def where(self) -> str:
        at = f" at {self.parameter}" if self.parameter else ""
        return (f"round {self.round}" if self.round >= 0 else "preparation") + at


class SwitchError(AbortedOnAllRanks):
    """Raised on every rank of the group when a switch is aborted, with the failures of all ranks."""

    subject = "weight switch "


def first_by_rank(failures: Iterable[SwitchFailure]) -> list[SwitchFailure]:
    """Return one failure per rank, in the order of ranks: the earliest that names a parameter, else the earliest.
    Several ranks may report a rank that cannot report itself, and some of these were not waiting for its data."""
    first: dict[int, SwitchFailure] = {}
    for failure in sorted(failures, key=lambda f: (f.rank, not f.parameter, f.round, f.parameter)):
        first.setdefault(failure.rank, failure)
    return list(first.values())
