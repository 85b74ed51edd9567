"""Exchanges the bytes of a round between ranks, and their votes. One interface, two implementations:

    shared      the receiver maps the sender's storage and copies from it into its own: one copy a byte, no buffers;
                messages over `PeerSockets` say when it is there, and read       all ranks on one machine
    collective  pack ─► send slot ─ all_to_all_single ─► receive slot ─ unpack: hccl, nccl or gloo          everywhere

The faster one that can be is chosen once per group: `shared` where every rank of the group is on one machine and its
card can share memory, else `collective` (a group that spans machines does not mix the two: its rounds are as long as
the links between machines make them). Two rounds can be under way: `collective` has two slots of each kind.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fusion.ep_switch.outcome import SwitchFailure, first_by_rank
from fusion.ep_switch.program import Program
from fusion.ep_switch.segment import Segment
from fusion.ep_switch.stopwatch import Stopwatch
from fusion.npu import Device
from fusion.npu.failures import FailureKind

STAGE = "weight switch"

Kind = Literal["auto", "shared", "collective"]


@dataclass(frozen=True)
class Vote:
    """What a rank reports to all others before and after the rounds."""

    failures: tuple[SwitchFailure, ...] = ()
    digest: int = 0
    """Of its plan: `Plan.digest`."""

    def encode(self) -> bytes:
        return json.dumps([self.digest, [failure.to_json() for failure in self.failures]]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Vote:
        digest, failures = json.loads(data)
        return cls(tuple(map(SwitchFailure.from_json, failures)), digest)


class PeerLost(Exception):
    """A rank that was waited for will not answer: its process ended, or (``left``) it has aborted and reported why."""

    parameter = ""
    """What was waited for."""

    def __init__(self, rank: int, reason: str, left: bool = False):
        super().__init__(f"rank {rank}: {reason}")
        self.rank, self.reason, self.left = rank, reason, left


class Exchange(ABC):
    """One rank's end of the exchange. ``peers``: every rank of the group, among them those of the plan. The calls of a
    switch come in the order begin, open, agree, (settle k-2, send k, receive k-1) for every round, agree, close.
    """

    name: str

    def __init__(self, rank: int, peers: Sequence[int], device: Device, clock: Stopwatch):
        self.rank, self.peers, self.device, self.clock = rank, tuple(peers), device, clock

    @abstractmethod
    def begin(self) -> None:
        """Begins a switch, and discards what is left of the one before."""

    @abstractmethod
    def open(self, program: Program, checksum: bool) -> None:
        """Allocates the buffers it needs, charged to "buckets"."""

    @abstractmethod
    def agree(self, vote: Vote) -> dict[int, Vote]:
        """Returns every rank's vote. A rank that does not answer is in it with a failure, reported by who noticed."""

    @abstractmethod
    def send(self, index: int, segments: Sequence[Segment]) -> None:
        """Sends what leaves in a round; returns without waiting for it to arrive."""

    @abstractmethod
    def settle(self, index: int) -> None:
        """Waits until what was sent in a round may be freed."""

    @abstractmethod
    def receive(self, index: int, segments: Sequence[Segment]) -> None:
        """Waits for what comes in a round and takes it."""

    @abstractmethod
    def abandon(self) -> None:
        """Joins what its peers still wait for, after a failure of this rank, until the closing agreement."""

    @abstractmethod
    def close(self) -> None:
        """Releases the buffers."""


class Alone(Exchange):
    """The exchange of a single rank: nothing travels."""

    name = "none"

    def begin(self) -> None: ...
    def open(self, program: Program, checksum: bool) -> None: ...
    def agree(self, vote: Vote) -> dict[int, Vote]:
        return {self.rank: vote}

    def send(self, index: int, segments: Sequence[Segment]) -> None: ...
    def settle(self, index: int) -> None: ...
    def receive(self, index: int, segments: Sequence[Segment]) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...


def lost_rank(
    rank: int, reason: str, *, round_: int = -1, parameter: str = "", kind: FailureKind = FailureKind.DIED
) -> SwitchFailure:
    """The failure of a rank that cannot report it itself."""
    return SwitchFailure(rank, STAGE, kind, "", reason, round=round_, parameter=parameter)


def failures_of(votes: dict[int, Vote]) -> list[SwitchFailure]:
    """Returns the failures in the votes, including plans that differ; the same on every rank with the same votes."""
    failures = [failure for vote in votes.values() for failure in vote.failures]
    if not failures and len({vote.digest for vote in votes.values()}) > 1:
        return [lost_rank(rank, "plans another switch", kind=FailureKind.FAILED) for rank in sorted(votes)]
    return first_by_rank(failures)
