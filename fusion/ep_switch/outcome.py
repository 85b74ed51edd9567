"""The outcome of a switch: a report on every rank, or an error with the failures of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fusion.npu.failures import AbortedOnAllRanks, RankFailure


@dataclass(frozen=True)
class SwitchReport:
    """Reports what a switch did on this rank."""

    bytes_moved: int
    """Received from other ranks; over all ranks, what travelled. Checksums are not counted."""
    bytes_local: int
    """Copied inside the rank, in bytes of the target. What both layouts share is not copied."""
    seconds: float
    rounds: int
    peak_bytes: int
    """The most bytes of weights, send and receive buffers at once, by the device's allocator."""
    peak_reserved: int
    """The most bytes the allocator had reserved at once, less what others than the two models had allocated at the
    start: rounding and cached blocks are counted."""
    bytes_hosted: int = 0
    """Filled from this rank's host memory, in bytes of the target."""
    exchange: str = "none"
    """How bytes got from rank to rank: `shared`, `collective`, or `none` on a single rank."""
    received_bytes: dict[str, int] = field(default_factory=dict)
    """`bytes_moved` by the level of the link (`topology.LEVELS`)."""
    parts_s: dict[str, float] = field(default_factory=dict)
    """Seconds by part (`PARTS`); they add up to `seconds`. What overlaps on a card's streams counts where the stream
    waits for it."""


PARTS = ("prepare", "memory", "pack", "exchange", "unpack", "finish")
"""prepare: buffers and the agreement to start. memory: storage taken and given back. pack: copies that stay on the
rank, and sources into send buffers. exchange: waiting for other ranks. unpack: what others have, or sent, into the
target. finish: the agreement that all are done."""


@dataclass(frozen=True)
class SwitchFailure(RankFailure):
    """Why a rank left a switch."""

    round: int = -1
    """-1: before the first."""
    parameter: str = ""
    """What failed to move; empty where none was at hand."""

    @property
    def where(self) -> str:
        at = f" at {self.parameter}" if self.parameter else ""
        return (f"round {self.round}" if self.round >= 0 else "preparation") + at


class SwitchError(AbortedOnAllRanks):
    """A switch that was aborted; raised on every rank of the group with the failures of all ranks."""

    subject = "weight switch "


def first_by_rank(failures: Iterable[SwitchFailure]) -> list[SwitchFailure]:
    """Returns one failure a rank, in the order of ranks: the earliest of those that name a parameter, if any does.
    Several ranks may report one that cannot itself, and some of them were not waiting for anything of it."""
    first: dict[int, SwitchFailure] = {}
    for failure in sorted(failures, key=lambda one: (one.rank, not one.parameter, one.round, one.parameter)):
        first.setdefault(failure.rank, failure)
    return list(first.values())
