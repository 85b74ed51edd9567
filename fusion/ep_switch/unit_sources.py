"""The way back to TRAIN: which parts of the weights come over the wire, which from the masters on the host. Pure.

A rank that needs a part of the weights in the training layout gets it from the ranks that generated with it. Where the
part's fp32 masters lie on its own host, it may instead copy those in and round them, which gives the same bits: the
weights were made that way. The wire and the host link run at the same time, so a return takes the longer of the two.

Invariants (property-tested in tests/ep_switch/test_unit_sources.py): a part the rank holds stays where it is, and one
without masters comes over the wire; the longer side is never longer than with everything over the wire, nor than with
all that can come from the host; it is within one part's s·h/(s+h) of the optimum over fractional parts (s: seconds the
part saves on the wire, h: seconds it costs on the host link); the same input gives the same plan on every rank.

This is scheduling on two unrelated machines (R2||Cmax, NP-hard in whole parts). The fractional optimum moves parts to
the host in the order of h/s and splits one of them; the best of all cuts of that order rounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Source = Literal["wire", "host"]


@dataclass(frozen=True)
class Part:
    """A part of one rank's weights in the training layout."""

    wire_bytes: int
    """Received if it comes over the wire, in the weights' dtype; 0: the rank holds it already."""
    master_bytes: int | None = None
    """Copied in from the host if it comes from there (4 bytes an element); None: it cannot."""


@dataclass(frozen=True)
class ReturnPlan:
    """Where each part comes from, in the order of the parts, and until when each link is busy."""

    sources: tuple[Source, ...]
    wire_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        return max(self.wire_s, self.host_s)


def plan_return(parts: Sequence[Part], wire_bytes_per_s: float, host_bytes_per_s: float) -> ReturnPlan:
    """Chooses the source of every part so that the link that ends last ends early.

    Args:
        wire_bytes_per_s, host_bytes_per_s: into this rank, when both are busy; the wire's is that of the slowest link
            the parts cross.
    """
    assert wire_bytes_per_s > 0 and host_bytes_per_s > 0, "expected bandwidths > 0"
    wire, host = sum(part.wire_bytes for part in parts), 0
    best = _Cut(wire, host, 0, wire_bytes_per_s, host_bytes_per_s)
    gain = [index for index, part in enumerate(parts) if part.master_bytes is not None and part.wire_bytes > 0]
    order = sorted(gain, key=lambda index: (Fraction(parts[index].master_bytes or 0, parts[index].wire_bytes), index))
    for count, index in enumerate(order, start=1):
        wire -= parts[index].wire_bytes
        host += parts[index].master_bytes or 0
        best = min(best, _Cut(wire, host, count, wire_bytes_per_s, host_bytes_per_s), key=_Cut.rank)
    from_host = set(order[: best.count])
    sources: tuple[Source, ...] = tuple("host" if index in from_host else "wire" for index in range(len(parts)))
    return ReturnPlan(sources, best.wire_s, best.host_s)


@dataclass(frozen=True)
class _Cut:
    """The first ``count`` parts of the order come from the host; bytes over each link."""

    wire: int
    host: int
    count: int
    wire_bytes_per_s: float
    host_bytes_per_s: float

    @property
    def wire_s(self) -> float:
        return self.wire / self.wire_bytes_per_s

    @property
    def host_s(self) -> float:
        return self.host / self.host_bytes_per_s

    def rank(self) -> tuple[float, float, int]:
        """Among cuts that end alike, the one that keeps the links busy for the shorter time; then the fewer parts."""
        return max(self.wire_s, self.host_s), self.wire_s + self.host_s, self.count
