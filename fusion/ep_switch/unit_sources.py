"""Choose for the switch to TRAIN which parts of the weights come over the wire, and which from host masters. Pure.

A rank that needs a part of the weights in the training layout receives it from the ranks that generated with it (over
the wire). If the part's fp32 masters are on its own host, it can instead copy and round these, which gives the same
bits, since weights are rounded masters. Wire and host link run at the same time, so a return takes the longer of the
two.

Invariants (property-tested in tests/ep_switch/test_unit_sources.py): a part that the rank holds is not moved, and a
part without masters comes over the wire; a return never takes longer than with all parts over the wire, nor than with
all possible parts from the host; it is within one part's s·h/(s+h) of the optimum over fractional parts (s: seconds
that the part saves on the wire, h: seconds that it costs on the host link); the same input gives the same plan on every
rank.

This is scheduling on two unrelated machines (R2||Cmax, NP-hard for whole parts). The fractional optimum moves parts to
the host in the order of h/s and splits one of them; the plan is the best of all cuts of that order."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Source = Literal["wire", "host"]


@dataclass(frozen=True)
class TrainedPart:
    """A part of one rank's weights in the training layout."""

    wire_bytes: int
    """Bytes received if it comes over the wire, in the weights' dtype; 0: the rank holds it already."""
    master_bytes: int | None = None
    """Bytes copied if it comes from the host (4 per element); None: it cannot."""


@dataclass(frozen=True)
class ReturnPlan:
    """The source of each part, in the order of the parts, and the seconds that each link is busy."""

    sources: tuple[Source, ...]
    wire_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        return max(self.wire_s, self.host_s)


def plan_return(parts: Sequence[TrainedPart], wire_bytes_per_s: float, host_bytes_per_s: float) -> ReturnPlan:
    """Choose the source of every part to minimise the time until both links are done.
    ``wire_bytes_per_s``, ``host_bytes_per_s``: bandwidth into this rank while both are busy; the wire's is that of the
    slowest link that the parts cross."""
    assert wire_bytes_per_s > 0 and host_bytes_per_s > 0, "expected bandwidths > 0"
    movable = [index for index, part in enumerate(parts) if part.master_bytes is not None and part.wire_bytes > 0]
    cost = {index: Fraction(parts[index].master_bytes or 0, parts[index].wire_bytes) for index in movable}
    order = sorted(movable, key=lambda index: (cost[index], index))
    wire, host = sum(part.wire_bytes for part in parts), 0
    # Busy seconds of both links with the first 0, 1, 2, … parts of the order from the host.
    cuts = [(wire / wire_bytes_per_s, 0.0)]
    for index in order:
        wire, host = wire - parts[index].wire_bytes, host + (parts[index].master_bytes or 0)
        cuts.append((wire / wire_bytes_per_s, host / host_bytes_per_s))
    count = min(range(len(cuts)), key=lambda count: (max(cuts[count]), sum(cuts[count]), count))
    from_host = set(order[:count])
    sources: tuple[Source, ...] = tuple("host" if index in from_host else "wire" for index in range(len(parts)))
    return ReturnPlan(sources, *cuts[count])
