"""Rounds through memory that both ends have mapped.

    sender    wait until the slot's last readers are done ─ pack ─ "packed k, at this offset" ─►
    receiver  wait for the word ─ unpack straight from the sender's slot ─ "read k" ─►

The words go over `Lines`, so no round has a barrier: a rank waits only for those it deals with, and takes what is there
first. A word is said when the card has done what it says. Whoever fails says its closing word at once, which is what
the others then hear instead of the word they wait for; a line that ends tells of a process that did.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from fusion.ep_switch.checksum import run_sums
from fusion.ep_switch.exchange import Exchange, PeerGone, Word
from fusion.ep_switch.lines import Lines
from fusion.ep_switch.outcome import Failure
from fusion.ep_switch.program import Mapped, Program, Segment
from fusion.ep_switch.stopwatch import Stopwatch
from fusion.npu import Device, SharedBlock

PACKED, READ, WORD = range(3)
_HEAD = struct.Struct("<Bqq")
"""Kind, round, and for PACKED the offset in the sender's memory in elements. Then its checksums, or a pickled Word."""

ROUND_TIMEOUT_S, START_TIMEOUT_S, GOODBYE_TIMEOUT_S = 120.0, 1800.0, 10.0
"""How long a rank whose process lives may keep the others waiting: in a round, before it joins the switch, and between
giving its memory back and saying why."""


class Talk:
    """What the ranks of a group have said to this one and is not yet dealt with; lives as long as their lines."""

    def __init__(self, lines: Lines, peers: Sequence[int]):
        self.lines = lines
        self.words: dict[int, list[Word]] = {peer: [] for peer in peers}
        self.packed: dict[int, dict[int, tuple[int, bytes]]] = {}
        self.read: dict[int, int] = {}

    def begin(self) -> None:
        """Forgets the rounds of the switch before. (Words stay: a fast rank has said its first of this switch.)"""
        self.packed = {peer: {} for peer in self.words}
        self.read = dict.fromkeys(self.words, -1)

    def say(self, peer: int, kind: int, index: int = 0, offset: int = 0, more: bytes = b"") -> None:
        self.lines.tell(peer, _HEAD.pack(kind, index, offset) + more)

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
        kind, index, offset = _HEAD.unpack_from(message)
        if kind == PACKED:
            self.packed[peer][index] = offset, message[_HEAD.size :]
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
        self._slots: list[tuple[int, list[int]]] = [(-1, []), (-1, [])]  # (last round in it, who reads it)
        self._block: SharedBlock | None = None
        self._scratch: torch.Tensor | None = None

    def open(self, program: Program, checksum: bool) -> bytes:
        self._program = program
        with self.device.owner("buckets"):
            if checksum:
                size, dtype = program.largest_segment, program.wire_dtype
                self._scratch = torch.empty(size, dtype=dtype, device=self.device.torch_device)
            if program.send_numel == 0:
                return b""
            self._block = self.device.share(2 * program.send_numel * program.wire_dtype.itemsize)
        return self._block.handle

    def agree(self, word: Word) -> dict[int, Word]:
        for peer in self.others:
            self.talk.say(peer, WORD, more=pickle.dumps(word))
        words = {self.rank: word}
        while missing := [peer for peer in self.others if peer not in words]:
            try:
                self.talk.hear(missing, START_TIMEOUT_S, until=lambda peer: bool(self.talk.words[peer]))
            except PeerGone as gone:
                words[gone.rank] = Word((Failure(gone.rank, self._round, "", gone.reason),), word.digest)
            words |= {peer: self.talk.words[peer].pop(0) for peer in missing if self.talk.words[peer]}
        if any(each.failures for each in words.values()):
            self._forget()  # words of a switch that broke off must not reach the next one
        return words

    def start(self, words: dict[int, Word]) -> None:
        self._stream = self.device.current_stream()
        self._handles = {rank: word.handle for rank, word in words.items()}

    def send(self, index: int, segments: Sequence[Segment]) -> None:
        self._round = index
        last, readers = self._slots[index % 2]
        if waiting := [peer for peer in readers if self.talk.read[peer] < last]:
            while waiting := [peer for peer in waiting if self.talk.read[peer] < last]:
                self.talk.hear(waiting, ROUND_TIMEOUT_S, until=lambda peer: self.talk.read[peer] >= last)
            self.clock.mark("exchange")
        self._slots[index % 2] = index, [segment.peer for segment in segments]
        offset = index % 2 * self._program.send_numel
        for segment in segments:
            wire, along = self._memory(self.rank).wire(segment, offset)
            segment.pack(wire, along)
            sums = b"" if self._scratch is None else run_sums(wire, segment.ends).cpu().numpy().tobytes()
            self._stream.synchronize()
            self.talk.say(segment.peer, PACKED, index, offset, sums)
            offset += segment.numel
        self.clock.mark("pack")

    def receive(self, index: int, segments: Sequence[Segment]) -> None:
        self._round = index
        waiting, packed = {segment.peer: segment for segment in segments}, self.talk.packed
        while waiting:
            ready = [peer for peer in waiting if index in packed[peer]]
            for peer in ready:
                self._unpack(waiting.pop(peer), *packed[peer].pop(index))
                self.talk.say(peer, READ, index)
            if ready:
                self.clock.mark("unpack")
            elif waiting:
                self._hear_from(waiting, ROUND_TIMEOUT_S, until=lambda peer: index in packed[peer])
                self.clock.mark("exchange")

    def abandon(self) -> None:
        """Nothing: the closing word comes at once."""

    def close(self) -> None:
        self._block = self._scratch = None

    def _unpack(self, segment: Segment, offset: int, sums: bytes) -> None:
        try:
            memory = self._memory(segment.peer)
        except ValueError as error:
            # Its owner gave up, or ended, after it had packed: that is its failure, and it says so or has hung up.
            self._hear_from({segment.peer: segment}, GOODBYE_TIMEOUT_S, until=lambda _: False)
            raise AssertionError("`hear` returns only when it has heard what it waits for") from error
        segment.unpack(*memory.wire(segment, offset))
        if self._scratch is not None:
            segment.verify(self._scratch[: segment.numel], torch.frombuffer(bytearray(sums), dtype=torch.int64))
        self._stream.synchronize()

    def _memory(self, rank: int) -> Mapped:
        """The wire buffer of a rank, mapped when its first word is there. Raises ValueError if it has freed it."""
        mapped, handle = self._program.mapped, self._handles[rank]
        if rank not in mapped or mapped[rank].handle != handle:
            mapped[rank] = Mapped(handle, self.device.map(handle).tensor.view(self._program.wire_dtype))
        return mapped[rank]

    def _hear_from(self, waiting: Mapping[int, Segment], timeout_s: float, until: Callable[[int], bool]) -> None:
        try:
            self.talk.hear(list(waiting), timeout_s, until)
        except PeerGone as gone:
            gone.parameter = waiting[gone.rank].name
            raise
