"""Exchange the bytes of a round between ranks, and their votes. One interface, two implementations:

    shared      the receiver maps the sender's storage and copies from it into its own: one copy per byte, no buffers;
                messages over `PeerSockets` report data as ready and as read     all ranks on one machine
    collective  pack ─► send slot ─ all_to_all_single ─► receive slot ─ unpack: hccl, nccl or gloo          everywhere

The faster one that is possible is selected once per group: `shared` where every rank of the group is on one machine and
its card can share memory, else `collective` (a group that spans machines does not mix the two, since the links between
machines determine the duration of its rounds). Two rounds can be in flight: `collective` has two slots of each kind."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fusion.ep_switch.outcome import Stopwatch, SwitchFailure, first_by_rank
from fusion.ep_switch.program import Program
from fusion.ep_switch.segment import PeerSegment
from fusion.npu import Device
from fusion.npu.failures import FailureKind

STAGE = "weight switch"

Kind = Literal["auto", "shared", "collective"]


@dataclass(frozen=True)
class Vote:
    """Hold what a rank reports to all others before and after the rounds."""

    failures: tuple[SwitchFailure, ...] = ()
    digest: int = 0
    """Digest of the rank's plan: `Plan.digest`."""

    def encode(self) -> bytes:
        return json.dumps([self.digest, [failure.to_json() for failure in self.failures]]).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Vote":
        """Invert `encode`. Raise ValueError: the data are not those of a vote."""
        try:
            match json.loads(data):
                case [int(digest), [*failures]]:
                    return cls(tuple(map(SwitchFailure.from_json, failures)), digest)
        except RecursionError:
            pass
        raise ValueError(f"a vote of {len(data)} bytes: expected a digest and a list of failures")


class PeerLost(Exception):
    """Raised when a rank will not answer: its process ended, or (``left``) it has aborted and reported why.

    ``parameter`` names the tensor that was awaited."""

    def __init__(self, rank: int, reason: str, left: bool = False):
        super().__init__(f"rank {rank}: {reason}")
        self.rank, self.reason, self.left = rank, reason, left
        self.parameter = ""


class Exchange:
    """Implement one rank's end of the exchange; this one that of a rank alone, which sends nothing. ``peers``: every
    rank of the group, including those of the plan.

    The calls of a switch are made in the order begin, open, agree, (settle k-2, send k, receive k-1) for every round,
    agree, close."""

    name = "none"
    in_place = True
    """Whether it needs no buffers."""

    def __init__(self, *, rank: int, peers: Sequence[int], device: Device, clock: Stopwatch):
        self.rank, self.peers, self.device, self.clock = rank, tuple(peers), device, clock

    def begin(self) -> None:
        """Begin a switch and discard the state of the previous one."""

    def open(self, program: Program, checksum: bool) -> None:
        """Allocate the buffers that the exchange needs, owned by "buckets"."""

    def agree(self, vote: Vote) -> dict[int, Vote]:
        """Return every rank's vote. For a rank that does not answer, the rank that noticed reports the failure."""
        return {self.rank: vote}

    def send(self, index: int, segments: Sequence[PeerSegment]) -> None:
        """Send a round's outgoing segments, without waiting for their arrival."""

    def settle(self, index: int) -> None:
        """Wait until the storage sent in a round may be freed."""

    def receive(self, index: int, segments: Sequence[PeerSegment]) -> None:
        """Wait for a round's incoming segments and copy them into the target."""

    def abandon(self) -> None:
        """After a failure of this rank, join what its peers still wait for, until the closing agreement."""

    def close(self) -> None:
        """Release the buffers."""


def lost_rank(
    rank: int, reason: str, *, round_: int = -1, parameter: str = "", kind: FailureKind = FailureKind.DIED
) -> SwitchFailure:
    """Create the failure of a rank that cannot report it itself."""
    return SwitchFailure(rank=rank, stage=STAGE, kind=kind, error="", message=reason, round=round_, parameter=parameter)


def failures_of(votes: dict[int, Vote]) -> list[SwitchFailure]:
    """Return the failures in the votes, including differing plans; the same on every rank with the same votes."""
    failures = [failure for vote in votes.values() for failure in vote.failures]
    if not failures and len({vote.digest for vote in votes.values()}) > 1:
        return [lost_rank(rank, "plans another switch", kind=FailureKind.FAILED) for rank in sorted(votes)]
    return first_by_rank(failures)
