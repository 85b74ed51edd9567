"""Read what a rank needs directly from the storage of the rank that holds it, as cards of a supernode can.

    sender    "ready k, in these units" ─►                     ─► wait until all have read k ─ free unread units
    receiver  wait for it ─ copy from there into its own storage ─ "read k" ─►

Resident units of the source are ready for every round when the first one begins: one message to each peer says so. What
is relayed, restored from the host, or sent with checksums has a message in its round. The messages are sent over
`PeerSockets`, so no round has a barrier: a rank waits only for its own peers, and reads from the first that is ready. A
message is sent when the card has done the work that it reports; the sender's checksums, if enabled, are sent with
"ready". A rank that fails sends its closing vote at once, which its peers receive instead of the message that they wait
for; a closed socket means that its process has ended."""

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fusion.ep_switch.exchange import Exchange, PeerLost, Vote, lost_rank
from fusion.ep_switch.peer_sockets import MALFORMED, PeerSockets
from fusion.ep_switch.program import NO_PROGRAM, Program
from fusion.ep_switch.segment import Lent, PeerSegment
from fusion.npu import HANDLE_BYTES

READY, READ, VOTE = range(3)
_HEAD = struct.Struct("<Bqi")
"""Kind, round, and for READY the number of handles. Then a Vote, or the handles and the checksums."""
_SUM_BYTES = 8

ROUND_TIMEOUT_S, START_TIMEOUT_S, CLOSING_TIMEOUT_S = 120.0, 1800.0, 10.0
"""Seconds that the others wait for a rank whose process is alive: in a round, before it joins the switch, and between
the release of its memory and its closing vote."""


class Ready(NamedTuple):
    """Locate a round's segment by the handles of its units (`PeerSegment.lent`), with its checksums if enabled."""

    handles: bytes
    sums: bytes


@dataclass(frozen=True)
class Message:
    """A decoded message about round ``index``; ``ready``, ``vote``: of the kinds READY and VOTE."""

    kind: int
    index: int
    ready: Ready | None = None
    vote: Vote | None = None

    @classmethod
    def decode(cls, data: bytes) -> "Message":
        """Decode a message of any content. Raise ValueError: it is none that `PeerMessages.send` sends."""
        if len(data) < _HEAD.size:
            raise ValueError(f"a message of {len(data)} bytes: expected at least {_HEAD.size}")
        kind, index, count = _HEAD.unpack_from(data)
        payload, handle_bytes = data[_HEAD.size :], HANDLE_BYTES * count
        if index < 0:
            raise ValueError(f"a message about round {index}")
        if kind == VOTE:
            return cls(kind, index, vote=Vote.decode(payload))
        if kind == READ and not payload and not count:
            return cls(kind, index)
        if kind != READY or not 0 <= handle_bytes <= len(payload) or (len(payload) - handle_bytes) % _SUM_BYTES:
            raise ValueError(f"a message of kind {kind} with {count} handles and {len(payload)} bytes after its head")
        return cls(kind, index, ready=Ready(payload[:handle_bytes], payload[handle_bytes:]))


class PeerMessages:
    """Hold the received and unprocessed messages of a group's ranks; lives as long as their sockets."""

    def __init__(self, sockets: PeerSockets, peers: Sequence[int]):
        self.sockets = sockets
        self.votes: dict[int, list[Vote]] = {peer: [] for peer in peers}
        self.ready: dict[int, dict[int, Ready]] = {}
        self.read: dict[int, int] = {}

    def begin(self) -> None:
        """Discard the rounds of the previous switch, but no votes: a fast rank may already have sent its first one."""
        self.ready = {peer: {} for peer in self.votes}
        self.read = dict.fromkeys(self.votes, -1)

    def send(self, peer: int, kind: int, index: int = 0, *, handles: bytes = b"", payload: bytes = b"") -> None:
        self.sockets.send(peer, _HEAD.pack(kind, index, len(handles) // HANDLE_BYTES) + handles + payload)

    def wait_until(self, peers: Sequence[int], timeout_s: float, arrived: Callable[[int], bool]) -> None:
        """Receive messages until ``arrived`` holds for one of ``peers``.
        Raise PeerLost: one of them has left the switch, has ended, or did not answer in time."""
        deadline = time.monotonic() + timeout_s
        while not any(map(arrived, peers)):
            for peer in peers:
                if self.votes[peer]:
                    raise PeerLost(peer, "has left the switch", left=True)
                if peer in self.sockets.closed:
                    raise PeerLost(peer, self.sockets.closed[peer])
            if time.monotonic() > deadline:
                raise PeerLost(peers[0], f"has not answered for {timeout_s:.0f} s")
            for peer, message in self.sockets.receive(deadline - time.monotonic()):
                self._take(peer, message)

    def _take(self, peer: int, data: bytes) -> None:
        try:
            message = Message.decode(data)
        except ValueError:
            self.sockets.disconnect(peer, MALFORMED)
            return
        if message.ready is not None:
            self.ready[peer][message.index] = message.ready
        elif message.vote is not None:
            self.votes[peer].append(message.vote)
        else:
            self.read[peer] = message.index


class SharedExchange(Exchange):
    """Implement the exchange by reading the storage of other processes on this machine. `abandon` does nothing: the
    closing vote is sent at once. ``common``: as of `Exchange`."""

    name = "shared"

    def __init__(self, *, messages: PeerMessages, forget: Callable[[], object], **common: Any):
        super().__init__(**common)
        self.messages, self._forget = messages, forget
        self.others = [peer for peer in self.peers if peer != self.rank]
        self._program = NO_PROGRAM
        self._stream: Any = None
        self._round = -1
        self._sent: dict[int, dict[int, PeerSegment]] = {}
        self._located: set[int] = set()
        """Peers whose units that they lend first are mapped."""
        self._scratch: torch.Tensor | None = None

    def begin(self) -> None:
        self.messages.begin()
        self._round, self._sent, self._located, self._scratch = -1, {}, set(), None

    def open(self, program: Program, checksum: bool) -> None:
        self._program, self._stream = program, self.device.current_stream()
        if checksum:
            with self.device.owner("buckets"):
                size, dtype = program.largest_segment, program.wire_dtype
                self._scratch = torch.empty(size, dtype=dtype, device=self.device.torch_device)

    def agree(self, vote: Vote) -> dict[int, Vote]:
        for peer in self.others:
            self.messages.send(peer, VOTE, payload=vote.encode())
        votes, timeout_s = {self.rank: vote}, START_TIMEOUT_S if self._round < 0 else ROUND_TIMEOUT_S
        while missing := [peer for peer in self.others if peer not in votes]:
            try:
                self.messages.wait_until(missing, timeout_s, arrived=lambda peer: bool(self.messages.votes[peer]))
            except PeerLost as lost:
                votes[lost.rank] = Vote((lost_rank(lost.rank, lost.reason, round_=self._round),), vote.digest)
            votes |= {peer: self.messages.votes[peer].pop(0) for peer in missing if self.messages.votes[peer]}
        if any(peer_vote.failures for peer_vote in votes.values()):
            self._forget()  # votes of an aborted switch must not reach the next one
        return votes

    def send(self, index: int, segments: Sequence[PeerSegment]) -> None:
        self._round = index
        self._sent[index] = {segment.peer: segment for segment in segments}
        if index == 0 and self._scratch is None:
            for peer, units in self._program.lent_first[0].items():
                self._lend(peer, index, units)
        for segment in segments:
            if not self._is_lent_first(segment):
                self._lend(segment.peer, index, segment.lent, sums=self._sums(segment))
        self.clock.mark("pack")

    def _lend(self, peer: int, index: int, units: Sequence[Lent], sums: bytes = b"") -> None:
        handles = self.device.share([self._program.storage[relayed][unit] for relayed, unit in units])
        self.messages.send(peer, READY, index, handles=handles, payload=sums)

    def _is_lent_first(self, segment: PeerSegment) -> bool:
        return self._scratch is None and not self._program.parks and segment.is_resident

    def settle(self, index: int) -> None:
        reading, read = self._sent.pop(index), self.messages.read
        while reading := {peer: segment for peer, segment in reading.items() if read[peer] < index}:
            self._wait_for(reading, ROUND_TIMEOUT_S, arrived=lambda peer: read[peer] >= index)
        self.clock.mark("exchange")

    def receive(self, index: int, segments: Sequence[PeerSegment]) -> None:
        self._round = index
        waiting = {segment.peer: segment for segment in segments}
        while waiting:
            ready_peers = [peer for peer, segment in waiting.items() if self._is_ready(segment, index)]
            for peer in ready_peers:
                self._read(waiting.pop(peer), index)
                self.messages.send(peer, READ, index)
            if ready_peers:
                self.clock.mark("unpack")
            elif waiting:
                self._wait_for(waiting, ROUND_TIMEOUT_S, arrived=lambda peer: self._is_ready(waiting[peer], index))
                self.clock.mark("exchange")

    def close(self) -> None:
        self._scratch = None

    def _is_ready(self, segment: PeerSegment, index: int) -> bool:
        ready = self.messages.ready[segment.peer]
        return segment.peer in self._located or 0 in ready if self._is_lent_first(segment) else index in ready

    def _read(self, segment: PeerSegment, index: int) -> None:
        ready = self.messages.ready[segment.peer]
        if not self._is_lent_first(segment):
            sums = self._locate(segment, ready.pop(index), segment.lent).sums
        elif segment.peer not in self._located:
            self._locate(segment, ready.pop(0), self._program.lent_first[1][segment.peer])
            self._located.add(segment.peer)
        segment.read()
        if self._scratch is not None:
            segment.verify(self._scratch[: segment.numel], torch.frombuffer(bytearray(sums), dtype=torch.int64))
        self._stream.synchronize()

    def _locate(self, segment: PeerSegment, ready: Ready, units: Sequence[Lent]) -> Ready:
        """Map the sender's units."""
        try:
            mapped, dtypes = self._program.mapped[segment.peer], self._program.dtypes
            mapped.map(units, ready.handles, device=self.device, dtypes=dtypes)
        except ValueError as error:
            # The sender failed or ended after it sent this: it reports the failure, or its socket has closed.
            self._wait_for({segment.peer: segment}, CLOSING_TIMEOUT_S, arrived=lambda _: False)
            raise AssertionError("`wait_until` must raise, as nothing can arrive") from error
        return ready

    def _sums(self, segment: PeerSegment) -> bytes:
        if self._scratch is None:
            return b""
        wire = self._scratch[: segment.numel]
        segment.pack(wire)
        return segment.sums(wire).cpu().numpy().tobytes()

    def _wait_for(self, waiting: Mapping[int, PeerSegment], timeout_s: float, arrived: Callable[[int], bool]) -> None:
        try:
            self.messages.wait_until(list(waiting), timeout_s, arrived)
        except PeerLost as lost:
            lost.parameter = waiting[lost.rank].name
            raise
