"""Rounds in which every rank reads what it needs out of the storage of who has it, as cards of a supernode can.

    sender    "ready k, in these units" ─►                     ─► wait until all have read k ─ free what nobody reads
    receiver  wait for the word ─ copy from there into its own storage ─ "read k" ─►

The words go over `Lines`, so no round has a barrier: a rank waits only for those it deals with, and takes what is there
first. A word is said when the card has done what it says. With checksums, the sender's go with "ready". Whoever fails
says its closing word at once, which is what the others then hear instead of the word they wait for; a line that ends
tells of a process that did.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from fusion.ep_switch.exchange import Exchange, PeerGone, Word
from fusion.ep_switch.lines import Lines
from fusion.ep_switch.outcome import Failure
from fusion.ep_switch.program import Program
from fusion.ep_switch.segment import Segment
from fusion.ep_switch.stopwatch import Stopwatch
from fusion.npu import HANDLE_BYTES, Device

READY, READ, WORD = range(3)
_HEAD = struct.Struct("<Bqi")
"""Kind, round, and for READY the number of handles. Then a Word, pickled, or the handles and the checksums."""

ROUND_TIMEOUT_S, START_TIMEOUT_S, GOODBYE_TIMEOUT_S = 120.0, 1800.0, 10.0
"""How long a rank whose process lives may keep the others waiting: in a round, before it joins the switch, and between
giving its memory back and saying why."""


class Ready(NamedTuple):
    """Where a round's segment lies, by units (`Segment.lent`), and its checksums if there are any."""

    handles: tuple[bytes, ...]
    sums: bytes


class Talk:
    """What the ranks of a group have said to this one and is not yet dealt with; lives as long as their lines."""

    def __init__(self, lines: Lines, peers: Sequence[int]):
        self.lines = lines
        self.words: dict[int, list[Word]] = {peer: [] for peer in peers}
        self.ready: dict[int, dict[int, Ready]] = {}
        self.read: dict[int, int] = {}

    def begin(self) -> None:
        """Forgets the rounds of the switch before. (Words stay: a fast rank has said its first of this switch.)"""
        self.ready = {peer: {} for peer in self.words}
        self.read = dict.fromkeys(self.words, -1)

    def say(self, peer: int, kind: int, index: int = 0, handles: Sequence[bytes] = (), more: bytes = b"") -> None:
        self.lines.tell(peer, _HEAD.pack(kind, index, len(handles)) + b"".join(handles) + more)

    def hear(self, peers: Sequence[int], timeout_s: float, until: Callable[[int], bool]) -> None:
        """Listens until one of ``peers`` has said what is waited for.

        Raises:
            PeerGone: one of them never will.
        """
        deadline = time.monotonic() + timeout_s
        while not any(map(until, peers)):
            for peer in peers:
                if self.words[peer]:
                    raise PeerGone(peer, "has left the switch", left=True)
                if peer in self.lines.gone:
                    raise PeerGone(peer, "its process has ended")
            if time.monotonic() > deadline:
                raise PeerGone(peers[0], f"has not answered for {timeout_s:.0f} s")
            for peer, message in self.lines.hear(deadline - time.monotonic()):
                self._take(peer, message)

    def _take(self, peer: int, message: bytes) -> None:
        kind, index, count = _HEAD.unpack_from(message)
        if kind == READY:
            ends = [_HEAD.size + HANDLE_BYTES * number for number in range(count + 1)]
            handles = tuple(message[start:stop] for start, stop in pairwise(ends))
            self.ready[peer][index] = Ready(handles, message[ends[-1] :])
        elif kind == READ:
            self.read[peer] = index
        else:
            self.words[peer].append(pickle.loads(message[_HEAD.size :]))


class SharedExchange(Exchange):
    name = "shared"

    def __init__(
        self,
        rank: int,
        peers: Sequence[int],
        device: Device,
        clock: Stopwatch,
        talk: Talk,
        forget: Callable[[], object],
    ):
        super().__init__(rank, peers, device, clock)
        self.talk, self._forget = talk, forget
        self.others = [peer for peer in peers if peer != rank]

    def begin(self) -> None:
        self._round = -1
        self.talk.begin()
        self._sent: dict[int, dict[int, Segment]] = {}
        self._scratch: torch.Tensor | None = None

    def open(self, program: Program, checksum: bool) -> None:
        self._program, self._stream = program, self.device.current_stream()
        if checksum:
            with self.device.owner("buckets"):
                size, dtype = program.largest_segment, program.wire_dtype
                self._scratch = torch.empty(size, dtype=dtype, device=self.device.torch_device)

    def agree(self, word: Word) -> dict[int, Word]:
        for peer in self.others:
            self.talk.say(peer, WORD, more=pickle.dumps(word))
        words, patience_s = {self.rank: word}, START_TIMEOUT_S if self._round < 0 else ROUND_TIMEOUT_S
        while missing := [peer for peer in self.others if peer not in words]:
            try:
                self.talk.hear(missing, patience_s, until=lambda peer: bool(self.talk.words[peer]))
            except PeerGone as gone:
                words[gone.rank] = Word((Failure(gone.rank, self._round, "", gone.reason),), word.digest)
            words |= {peer: self.talk.words[peer].pop(0) for peer in missing if self.talk.words[peer]}
        if any(each.failures for each in words.values()):
            self._forget()  # words of a switch that broke off must not reach the next one
        return words

    def send(self, index: int, segments: Sequence[Segment]) -> None:
        self._round = index
        self._sent[index] = {segment.peer: segment for segment in segments}
        for segment in segments:
            handles = [self.device.share(flat) for flat in segment.lent_storage()]
            self.talk.say(segment.peer, READY, index, handles, self._sums(segment))
        self.clock.mark("pack")

    def settle(self, index: int) -> None:
        reading, read = self._sent.pop(index), self.talk.read
        while reading := {peer: segment for peer, segment in reading.items() if read[peer] < index}:
            self._hear_from(reading, ROUND_TIMEOUT_S, until=lambda peer: read[peer] >= index)
        self.clock.mark("exchange")

    def receive(self, index: int, segments: Sequence[Segment]) -> None:
        self._round = index
        waiting, ready = {segment.peer: segment for segment in segments}, self.talk.ready
        while waiting:
            there = [peer for peer in waiting if index in ready[peer]]
            for peer in there:
                self._read(waiting.pop(peer), ready[peer].pop(index))
                self.talk.say(peer, READ, index)
            if there:
                self.clock.mark("unpack")
            elif waiting:
                self._hear_from(waiting, ROUND_TIMEOUT_S, until=lambda peer: index in ready[peer])
                self.clock.mark("exchange")

    def abandon(self) -> None:
        """Nothing: the closing word comes at once."""

    def close(self) -> None:
        self._scratch = None

    def _read(self, segment: Segment, ready: Ready) -> None:
        try:
            segment.map(ready.handles, self.device, self._program.dtypes)
        except ValueError as error:
            # The sender gave up, or ended, after it had said this: that is its failure, and it says so or has hung up.
            self._hear_from({segment.peer: segment}, GOODBYE_TIMEOUT_S, until=lambda _: False)
            raise AssertionError("`hear` returns only when it has heard what it waits for") from error
        segment.read()
        if self._scratch is not None:
            sums = torch.frombuffer(bytearray(ready.sums), dtype=torch.int64)
            segment.verify(self._scratch[: segment.numel], sums)
        self._stream.synchronize()

    def _sums(self, segment: Segment) -> bytes:
        if self._scratch is None:
            return b""
        wire = self._scratch[: segment.numel]
        segment.pack(wire)
        return segment.sums(wire).cpu().numpy().tobytes()

    def _hear_from(self, waiting: Mapping[int, Segment], timeout_s: float, until: Callable[[int], bool]) -> None:
        try:
            self.talk.hear(list(waiting), timeout_s, until)
        except PeerGone as gone:
            gone.parameter = waiting[gone.rank].name
            raise
