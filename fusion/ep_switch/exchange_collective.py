"""Exchange rounds by collectives: an uneven, asynchronous all_to_all_single over the whole group.

A collective needs every rank of the group, so ranks that have nothing to exchange in a round (or no part in the plan)
join it with empty buffers, and a rank that has failed continues with the current content of its buffers: no rank waits
for it, and the closing vote reports it. When a process ends the group becomes unusable; the ranks that notice vote
through its store. Checksums are computed on the send buffer: they do not detect that a sender packs the wrong data."""

import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from fusion.ep_switch.checksum import NO_SUM
from fusion.ep_switch.exchange import Exchange, PeerLost, Vote, lost_rank
from fusion.ep_switch.program import NO_PROGRAM, Program
from fusion.ep_switch.segment import PeerSegment
from fusion.npu.all_or_none import gather_bytes
from fusion.npu.failures import FailureKind

PATIENCE_S = 3.0
"""Seconds that ranks which noticed that the group is broken wait for each other: ranks notice within a round."""

_STORE_POLL_S, _PAUSE_S = 0.2, 3e-4

_switches: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Switches begun in a group, the same on all its ranks."""


class CollectiveExchange(Exchange):
    """Implement the exchange by collectives of a process group. `settle` waits for nothing: the data was packed before
    any later work of this rank's stream. ``common``: as of `Exchange`."""

    name = "collective"
    in_place = False

    def __init__(self, *, group: dist.ProcessGroup, **common: Any):
        super().__init__(**common)
        self.group = group
        self._place = {peer: place for place, peer in enumerate(self.peers)}
        self._program, self._checksum = NO_PROGRAM, False
        self._round, self._posted, self._broken = -1, 0, ""
        self._works: dict[int, list[dist.Work]] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._out = self._in = self._sums_out = self._sums_in = torch.empty(0, 0)

    def begin(self) -> None:
        _switches[self.group] = _switches.get(self.group, 0) + 1
        self._round, self._posted, self._broken = -1, 0, ""
        self.close()

    def open(self, program: Program, checksum: bool) -> None:
        self._program, self._checksum = program, checksum
        with self.device.owner("buckets"):
            self._out, self._in = (
                torch.empty(2, numel, dtype=program.wire_dtype, device=self.device.torch_device)
                for numel in (program.send_numel, program.receive_numel)
            )
            if checksum:  # allocated now, because a rank that runs out of memory still has to join the rounds
                self._sums_out, self._sums_in = (
                    torch.full((2, max_sums), NO_SUM, dtype=torch.int64, device=self.device.torch_device)
                    for max_sums in program.max_sums
                )

    def agree(self, vote: Vote) -> dict[int, Vote]:
        if not self._broken:
            try:
                return self._gather(vote)
            except RuntimeError as error:
                self._broken = str(error)
        return self._roll_call(vote)

    def send(self, index: int, segments: Sequence[PeerSegment]) -> None:
        self._round = index
        if not self._program.stages[index].exchange:
            return
        sums = []
        for segment, wire in self._wires(self._out[index % 2], segments):
            segment.pack(wire)
            if self._checksum:
                sums.append(segment.sums(wire))
        self.clock.mark("pack")
        self._post(index, sums)

    def receive(self, index: int, segments: Sequence[PeerSegment]) -> None:
        self._round = index
        self._wait(index)
        self.clock.mark("exchange")
        sums = self._sums.pop(index, None)
        for segment, wire in self._wires(self._in[index % 2], segments):
            segment.unpack(wire)
            if sums is not None:
                expected, sums = sums.tensor_split([len(segment.ends)])
                segment.verify(wire, expected)
        self.clock.mark("unpack")

    def abandon(self) -> None:
        try:
            for index in range(self._posted, len(self._program.stages)):
                self._wait(index - 2)
                if self._program.stages[index].exchange:
                    self._post(index, [])
            for index in list(self._works):
                self._wait(index)
        except Exception as error:
            self._broken = self._broken or f"{type(error).__name__}: {error}"  # the closing agreement finds the rank

    def close(self) -> None:
        self._works.clear()
        self._sums.clear()
        self._out = self._in = self._sums_out = self._sums_in = torch.empty(0, 0)

    def _wires(self, slot: torch.Tensor, segments: Sequence[PeerSegment]) -> Iterable[tuple[PeerSegment, torch.Tensor]]:
        """Pair every segment with its range of a round's slot, in the order of the group."""
        ordered = sorted(segments, key=lambda segment: self._place[segment.peer])
        sizes = [segment.numel for segment in ordered]
        return zip(ordered, slot[: sum(sizes)].split(sizes), strict=True) if ordered else ()

    def _post(self, index: int, sums: list[torch.Tensor]) -> None:
        stage, half = self._program.stages[index], index % 2
        self._posted = index + 1
        counts = [self._counts(side, lambda segment: segment.numel) for side in (stage.send, stage.receive)]
        out, into = self._out[half, : sum(counts[0])], self._in[half, : sum(counts[1])]
        self._works[index] = [self._exchange(into, out, counts)]
        if self._checksum:
            counts = [self._counts(side, lambda segment: len(segment.ends)) for side in (stage.send, stage.receive)]
            sent, received = self._sums_out[half, : sum(counts[0])], self._sums_in[half, : sum(counts[1])]
            slices = sent.split([len(segment_sums) for segment_sums in sums]) if sums else ()
            for target, segment_sums in zip(slices, sums, strict=True):
                target.copy_(segment_sums)
            if not sums:
                sent.fill_(NO_SUM)
            self._works[index].append(self._exchange(received, sent, counts))
            self._sums[index] = received

    def _counts(self, segments, count) -> list[int]:
        by_peer = {segment.peer: count(segment) for segment in segments}
        return [by_peer.get(peer, 0) for peer in self.peers]

    def _exchange(self, into: torch.Tensor, out: torch.Tensor, counts: list[list[int]]) -> dist.Work:
        try:
            return dist.all_to_all_single(into, out, counts[1], counts[0], group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._break(error) from error

    def _wait(self, index: int) -> None:
        """Make the current stream wait for a round (or the host, where the collective is synchronous)."""
        try:
            for work in self._works.pop(index, ()):
                work.wait()
        except RuntimeError as error:
            raise self._break(error) from error

    def _break(self, error: Exception) -> PeerLost:
        self._broken = str(error)
        return PeerLost(-1, self._broken, left=True)

    def _gather(self, vote: Vote) -> dict[int, Vote]:
        # On the host: a collective may keep its tensor a little longer, which must not distort the card's memory.
        status = torch.tensor([int(bool(vote.failures)), vote.digest, -vote.digest])
        work = dist.all_reduce(status, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        store, look = self._store(), time.monotonic() + _STORE_POLL_S
        while not work.is_completed():
            time.sleep(_PAUSE_S)
            if time.monotonic() > look:
                look = time.monotonic() + _STORE_POLL_S
                if store.check(["broken"]):
                    raise RuntimeError("another rank found the process group broken")
        work.wait()
        failed, max_digest, neg_min_digest = status.tolist()
        if not failed and max_digest == -neg_min_digest:
            return {self.rank: vote}
        votes = gather_bytes(vote.encode(), self.group)
        return dict(zip(self.peers, map(Vote.decode, votes), strict=True))

    def _roll_call(self, vote: Vote) -> dict[int, Vote]:
        """Return the votes of the ranks that still answer, through the store instead of the group."""
        store = self._store()
        store.set("broken", "1")
        store.set(str(self.rank), vote.encode().decode())
        votes, deadline = {self.rank: vote}, time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and len(votes) < len(self.peers):
            for peer in self.peers:
                if peer not in votes and store.check([str(peer)]):
                    with suppress(ValueError):  # a value that is no vote is not that rank's
                        votes[peer] = Vote.decode(store.get(str(peer)))
            time.sleep(_PAUSE_S)
        for peer in self.peers:
            if peer not in votes:
                reason = f"has not answered for {PATIENCE_S:.0f} s; its process has ended or hangs ({self._broken})"
                votes[peer] = Vote(
                    (lost_rank(peer, reason, round_=self._round, parameter=self._due(peer)),), vote.digest
                )
        if not any(peer_vote.failures for peer_vote in votes.values()):
            failure = lost_rank(self.rank, self._broken, round_=self._round, kind=FailureKind.PEER_LOST)
            votes[self.rank] = Vote((failure,), vote.digest)
        return votes

    def _due(self, peer: int) -> str:
        """Return the name of the next segment that ``peer`` had to send to this rank."""
        stages = self._program.stages[self._round :] if self._round >= 0 else []
        return next((segment.name for stage in stages for segment in stage.receive if segment.peer == peer), "")

    def _store(self) -> dist.Store:
        prefix = f"rlfusion/switch/{self.group.group_name}/{_switches[self.group]}/"
        return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
