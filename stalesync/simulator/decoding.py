"""Advance the sequences of a rank that decode, without visiting them: each by the tokens of its track a step.

A track holds the sequences that advance alike. Its position is the number of tokens that each of them has gained since
the start, a line in the engine's steps; a sequence ends where the position has grown by what it lacks. Without drafts
there is one track, whose position is the number of steps. With them a step verifies ``drafted`` tokens behind each
sequence, and keeps as many on average as the track's acceptance promises (`drafts.py`): positions are not whole then.

    position │    ╱      track of sequences with many finished siblings
             │  ╱  __─   track of those with none
             └────────► step

Between two changes the sum of contexts is a line in the step, and the KV blocks are counted by `GrowingBlocks`.

Invariants (property-tested): a sequence has ended after the first step at which its track has gained what it lacked
when it was added; moved between tracks it keeps its tokens; without drafts all numbers are whole.

Cost, for n sequences and t tracks: `add`, `remove` and `move` O(log n + t), all others O(t)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import ceil, floor

from stalesync.simulator.sequence import SimulatedSequence


class GrowingBlocks:
    """Counts the KV blocks of sequences that grow by one token a step. ``size``: tokens of a block.

    A sequence of n tokens has ceil(n / size) blocks. If it had ``length`` tokens after step k0, it has length - k0 + k
    after step k, so it takes a block at the steps k with the same remainder modulo the block size: the count of
    sequences by remainder suffices. Invariant (property-tested): `used` is the sum of the blocks of all sequences that
    were added and not removed. Cost: `add`, `remove` O(1); `used` O(size), whatever the number of sequences."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._by_remainder = [0] * size
        self._whole = 0
        self.num_sequences = 0

    def add(self, length: int, step: int) -> None:
        """Add a sequence that has ``length`` tokens after ``step`` steps."""
        self._count(length, step, 1)

    def remove(self, length: int, step: int) -> None:
        """Remove one: ``length`` and ``step`` as it was added, or any later pair of the same sequence."""
        self._count(length, step, -1)

    def used(self, step: int) -> int:
        """Count the blocks after ``step`` steps."""
        rounds, rest = divmod(step, self.size)
        started = sum(self._by_remainder[self.size - rest :]) if rest else 0
        return self._whole + rounds * self.num_sequences + started

    def _count(self, length: int, step: int, sign: int) -> None:
        whole, remainder = divmod(length - step + self.size - 1, self.size)
        self._whole += sign * whole
        self._by_remainder[remainder] += sign
        self.num_sequences += sign


EPSILON = 1e-6
"""Tokens by which a position may be wrong"""


@dataclass(slots=True)
class Track:
    """Sequences that advance by ``rate`` tokens a step; ``position`` after ``step`` steps; ``offset``: sum of their
    lengths, minus ``num`` x position."""

    growing: GrowingBlocks
    rate: float = 1
    step: int = 0
    position: float = 0
    num: int = 0
    offset: float = 0
    ends: list[tuple[float, int, int, SimulatedSequence]] = field(default_factory=list)
    """(position, order, stamp, sequence), a heap; entries with an earlier stamp of their sequence are void"""

    def at(self, step: int) -> float:
        """Return the position after ``step`` steps."""
        return self.position + self.rate * (step - self.step)

    @property
    def first_end(self) -> float | None:
        """The position at which the next sequence ends."""
        while self.ends and self.ends[0][2] != self.ends[0][3].stamp:
            heapq.heappop(self.ends)
        return self.ends[0][0] if self.ends else None


class Decoding:
    """The decoding sequences of a rank. ``decoded_tokens``, ``context_sum``: tokens decoded since the start, up to the
    last change, and the sum of their contexts."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.tracks: dict[int, Track] = {0: self._track()}
        self.num = 0
        self.drafted = 0
        """Tokens that are verified behind each sequence in a step"""
        self.decoded_tokens: float = 0
        self.context_sum: float = 0
        self._counted = 0
        """Step up to which these are counted"""

    def add(self, seq: SimulatedSequence, step: int) -> None:
        """Add a sequence to its track (`SimulatedSequence.track`)."""
        self.count(step)
        track = self.tracks.get(seq.track)
        if track is None:
            track = self.tracks[seq.track] = self._track()
        seq.since, seq.decoding = track.at(step), True
        self._insert(seq, track)
        self.num += 1

    def remove(self, seq: SimulatedSequence, step: int) -> int:
        """Remove a sequence; return its length."""
        self.count(step)
        track = self.tracks[seq.track]
        length = self.length(seq, step)
        self._withdraw(seq, track)
        seq.decoding = False
        self.num -= 1
        return length

    def move(self, seq: SimulatedSequence, step: int, to: int) -> None:
        """Move a sequence to another track."""
        self.count(step)
        track = self.tracks[seq.track]
        gained = track.at(step) - seq.since
        self._withdraw(seq, track)
        if to not in self.tracks:
            self.tracks[to] = self._track()
        seq.track = to
        seq.since = self.tracks[to].at(step) - gained
        self._insert(seq, self.tracks[to])

    def length(self, seq: SimulatedSequence, step: int) -> int:
        """Return a sequence's tokens after ``step`` steps: what a draft brings beyond its end is not kept."""
        return min(seq.limit, seq.length + floor(self.tracks[seq.track].at(step) - seq.since + EPSILON))

    def set_drafts(self, step: int, drafted: int, rates: dict[int, float]) -> None:
        """Verify ``drafted`` tokens behind each sequence from now on; ``rates``: tokens a step by track."""
        self.count(step)
        self.drafted = drafted
        for number, rate in rates.items():
            track = self.tracks[number]
            track.position, track.step, track.rate = track.at(step), step, rate

    def contexts(self, step: int) -> float:
        """Return the sum of the contexts of step number ``step``."""
        return sum(track.offset + track.num * track.at(step) for track in self.tracks.values())

    @property
    def num_by_track(self) -> dict[int, int]:
        return {number: track.num for number, track in self.tracks.items() if track.num}

    @property
    def growth(self) -> float:
        """Tokens by which the sum of contexts grows in a step."""
        return sum(track.num * track.rate for track in self.tracks.values())

    def used(self, step: int) -> int:
        """Count the KV blocks after ``step`` steps."""
        return sum(track.growing.used(floor(track.at(step) + EPSILON)) for track in self.tracks.values() if track.num)

    def first_end(self, step: int) -> int | None:
        """Return the step after which the next sequence has ended, at least ``step``; None: there is none."""
        ends = [
            step + max(0, ceil((end - track.at(step) - EPSILON) / track.rate))
            for track in self.tracks.values()
            if (end := track.first_end) is not None
        ]
        return min(ends, default=None)

    def ended(self, step: int) -> list[SimulatedSequence]:
        """Return the sequences that have ended after ``step`` steps; `remove` must follow."""
        sequences = []
        for track in self.tracks.values():
            while (end := track.first_end) is not None and end <= track.at(step) + EPSILON:
                sequences.append(heapq.heappop(track.ends)[3])
        return sequences

    def count(self, step: int) -> None:
        """Update the totals to ``step`` steps."""
        for track in self.tracks.values() if step > self._counted else ():
            first, after = track.at(self._counted), track.at(step)
            self.decoded_tokens += track.num * (after - first)
            self.context_sum += track.offset * (after - first) + track.num * (first + after - 1) * (after - first) / 2
        self._counted = step

    def _track(self) -> Track:
        return Track(GrowingBlocks(self._block_size))

    def _insert(self, seq: SimulatedSequence, track: Track) -> None:
        track.num += 1
        track.offset += seq.length - seq.since
        track.growing.add(seq.length, floor(seq.since + EPSILON))
        heapq.heappush(track.ends, (seq.since + seq.limit - seq.length, seq.order, seq.stamp, seq))

    def _withdraw(self, seq: SimulatedSequence, track: Track) -> None:
        seq.stamp += 1
        track.num -= 1
        track.offset = track.offset - (seq.length - seq.since) if track.num else 0
        track.growing.remove(seq.length, floor(seq.since + EPSILON))
