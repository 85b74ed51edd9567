"""How the bytes of a round get from rank to rank, and how ranks agree. One interface, two ways:

    shared      the receiver maps the sender's storage and copies from it into its own: one copy a byte, no buffers;
                words over `Lines` say when storage is there and when it was read         all ranks on one machine
    collective  pack ─► send slot ─ all_to_all_single ─► receive slot ─ unpack: hccl, nccl or gloo          everywhere

The faster one that can be is chosen once per group: `shared` where every rank of the group is on one machine and its
card can share memory, else `collective` (a group that spans machines does not mix the two: its rounds are as long as
the links between machines make them). Two rounds can be under way: `collective` has two slots of each kind.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from fusion.ep_switch.lines import Door, machine
from fusion.ep_switch.outcome import Failure, earliest
from fusion.ep_switch.program import Program, Segment
from fusion.ep_switch.stopwatch import Stopwatch
from fusion.npu import Device

Kind = Literal["auto", "shared", "collective"]


@dataclass(frozen=True)
class Word:
    """What a rank says to all others before and after the rounds."""

    failures: tuple[Failure, ...] = ()
    digest: int = 0
    """Of its plan: `Plan.digest`."""


class PeerGone(Exception):
    """A rank that was waited for will not answer: its process has ended, or (``left``) it has given up and said why."""

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
        """A switch begins: nothing is left of the one before."""

    @abstractmethod
    def open(self, program: Program, checksum: bool) -> None:
        """Takes what buffers it needs, charged to "buckets"."""

    @abstractmethod
    def agree(self, word: Word) -> dict[int, Word]:
        """Everyone's words. A rank that does not answer is in it with a failure, told by who noticed."""

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
        """After a failure of this rank: sees to it that no peer waits for it until the closing agreement."""

    @abstractmethod
    def close(self) -> None:
        """Gives the buffers back."""


class Alone(Exchange):
    """A single rank: it agrees with itself."""

    name = "none"

    def begin(self) -> None: ...
    def open(self, program: Program, checksum: bool) -> None: ...
    def agree(self, word: Word) -> dict[int, Word]:
        return {self.rank: word}

    def send(self, index: int, segments: Sequence[Segment]) -> None: ...
    def settle(self, index: int) -> None: ...
    def receive(self, index: int, segments: Sequence[Segment]) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...


def failures_of(words: dict[int, Word]) -> list[Failure]:
    """What the words complain of, plans that differ included; the same on every rank that heard the same words."""
    failures = [failure for word in words.values() for failure in word.failures]
    if not failures and len({word.digest for word in words.values()}) > 1:
        return [Failure(rank, -1, "", "plans another switch") for rank in sorted(words)]
    return earliest(failures)


_talks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The `Talk` of a process group, None where there can be none. It lives as long as the group, or until a failure."""


def open_exchange(device: Device, group: dist.ProcessGroup | None, kind: Kind, clock: Stopwatch) -> Exchange:
    """The exchange for switches over ``group`` (default: all processes). Collective over it the first time.

    Raises:
        ValueError: ``kind`` is `shared`, but not all ranks share a machine, or their cards no memory.
    """
    from fusion.ep_switch.exchange_collective import CollectiveExchange
    from fusion.ep_switch.exchange_shared import SharedExchange

    group = group or dist.distributed_c10d._get_default_group()
    rank, peers = dist.get_rank(), dist.get_process_group_ranks(group)
    if len(peers) == 1:
        return Alone(rank, peers, device, clock)
    if kind != "collective" and group not in _talks:
        _talks[group] = _meet(device, group, rank, peers)
    talk = _talks.get(group) if kind != "collective" else None
    if talk is not None:
        return SharedExchange(rank, peers, device, clock, talk, forget=lambda: _talks.pop(group, None))
    if kind == "shared":
        raise ValueError("exchange='shared': the ranks are not all on one machine with cards that share memory")
    return CollectiveExchange(rank, peers, device, clock, group)


def _meet(device: Device, group: dist.ProcessGroup, rank: int, peers: Sequence[int]) -> Any:
    from fusion.ep_switch.exchange_shared import Talk

    door, probe, handle = Door(), None, b""
    if device.can_share:
        probe = torch.zeros(1, device=device.torch_device)
        handle = device.share(probe)
    cards: list[Any] = [None] * len(peers)
    dist.all_gather_object(cards, (machine(), handle, door.address), group=group)
    together = len({where for where, _, _ in cards}) == 1 and all(handle for _, handle, _ in cards)
    able: list[Any] = [None] * len(peers)
    dist.all_gather_object(able, together and _can_map(device, [handle for _, handle, _ in cards]), group=group)
    if not all(able):
        door.close()
        return None
    return Talk(door.meet(rank, {peer: address for peer, (_, _, address) in zip(peers, cards, strict=True)}), peers)


def _can_map(device: Device, handles: Sequence[bytes]) -> bool:
    """Whether this process is let at the others' memory: a container's rules may forbid it on one machine, too."""
    try:
        for handle in handles:
            device.map(handle)
    except (RuntimeError, ValueError):
        return False
    return True
