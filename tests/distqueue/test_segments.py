"""The ledger of segments, driven at random: files are never shared, bounds hold, numbers are never given twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distqueue.segments import GRAIN, SegmentLedger, ShardState

LEASE_S = 10.0


class Ledger(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.numbers: list[int] = []
        self.gone: set[str] = set()

    @initialize(recycles=st.booleans(), pages=st.integers(5, 12))
    def create(self, recycles: bool, pages: int) -> None:
        self.ledger = SegmentLedger("e")
        for name in ("a", "b"):
            self.ledger.add_shard(
                ShardState(
                    name, node=name, folder=f"/{name}", max_bytes=pages * GRAIN, recycles=recycles, spill="/disk"
                )
            )

    def numbers_of(self, live: bool) -> list[int]:
        return [s.number for s in self.ledger.segments.values() if s.live == live and not s.dead]

    @rule(node=st.sampled_from("abc"), pages=st.integers(1, 5), exceed=st.booleans())
    def reserve(self, node: str, pages: int, exceed: bool) -> None:
        shard = self.ledger.shard_for(node)
        assert node == "c" or shard.name == node, "a node's writers write to its own shard"
        held = shard.held
        segment = self.ledger.reserve(shard.name, pages * GRAIN - 7, self.now_s + LEASE_S, exceed=exceed)
        if segment is None:
            live = shard.held - sum(shard.free.values())
            assert not exceed and live + pages * GRAIN > shard.max_bytes, "refused only where there is no room"
            return
        assert exceed or shard.held <= max(shard.max_bytes, held)
        assert segment.size >= pages * GRAIN - 7 and segment.number not in self.numbers
        assert segment.path not in self.gone, "a discarded file's name comes back"
        self.numbers.append(segment.number)

    @precondition(lambda self: self.numbers_of(live=False))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.ledger.commit(data.draw(st.sampled_from(self.numbers_of(live=False))))

    @precondition(lambda self: self.ledger.segments)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.ledger.free([data.draw(st.sampled_from(self.numbers_of(live=True) + self.numbers_of(live=False)))])

    @precondition(lambda self: self.numbers_of(live=True))
    @rule(data=st.data(), kept=st.booleans())
    def free_while_pinned(self, data: st.DataObject, kept: bool) -> None:
        number = data.draw(st.sampled_from(self.numbers_of(live=True)))
        path = self.ledger.segments[number].path
        with self.ledger.pinned(number):
            if not kept:
                self.ledger.free([number])
            self.reserve("a", 1, True)
            assert path not in [s.path for s in self.ledger.segments.values() if s.number != number]
            assert path not in [name for shard in self.ledger.shards.values() for name in shard.free]
            assert path not in [name for _, name in self.ledger.discards]
        assert (number in self.ledger.segments) == kept

    @precondition(lambda self: self.numbers_of(live=True))
    @rule(data=st.data(), name=st.sampled_from("ab"), spilled=st.booleans())
    def move(self, data: st.DataObject, name: str, spilled: bool) -> None:
        number = data.draw(st.sampled_from(self.numbers_of(live=True)))
        self.ledger.moved(number, name, f"/{name}/moved-{len(self.numbers)}-{number}-{self.now_s}", spilled=spilled)
        self.now_s += 0.001

    @rule(name=st.sampled_from("ab"), pages=st.integers(1, 5))
    def spill(self, name: str, pages: int) -> None:
        chosen = self.ledger.to_spill(name, pages * GRAIN)
        assert chosen == sorted(chosen, reverse=True), "the youngest first"
        for number in chosen:
            self.ledger.moved(number, name, f"/disk/{number}-{self.now_s}", spilled=True)
        self.now_s += 0.001
        if chosen:
            assert self.ledger.reserve(name, pages * GRAIN, self.now_s + LEASE_S), "there is room then"
            self.numbers += list(self.ledger.segments)[-1:]

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.free(self.ledger.expired(self.now_s))
        assert all(s.live or s.expires_s > self.now_s for s in self.ledger.segments.values())

    @invariant()
    def files_are_one_thing_each(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for shard, path in self.ledger.discards:
            assert path not in self.gone, "unlinked twice"
            self.gone.add(path)
            assert shard in "ab"
        self.ledger.discards.clear()
        used = [s.path for s in self.ledger.segments.values()]
        free = [path for shard in self.ledger.shards.values() for path in shard.free]
        assert len(used + free) == len(set(used + free)) and not self.gone & set(used + free)
        for name, shard in self.ledger.shards.items():
            here = sum(s.size for s in self.ledger.segments.values() if s.shard == name and not s.spilled)
            assert shard.held == here + sum(shard.free.values())
            assert shard.recycles or not shard.free


Ledger.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_ledger = Ledger.TestCase


def test_a_put_that_no_shard_could_ever_hold_is_refused() -> None:
    ledger = SegmentLedger("e")
    ledger.add_shard(ShardState("a", node="a", folder="/a", max_bytes=GRAIN + 2))
    with pytest.raises(
        ValueError, match="a put of 4,097 bytes; .* max_bytes=4,098, in whole blocks of 4,096: increase"
    ):
        ledger.reserve("a", GRAIN + 1, 0.0)


def test_a_freed_file_is_written_again_before_a_new_one_is_made() -> None:
    ledger = SegmentLedger("e")
    ledger.add_shard(ShardState("a", node="a", folder="/a", max_bytes=100 * GRAIN))
    first = ledger.reserve("a", 3 * GRAIN, 1.0)
    ledger.commit(first.number)
    ledger.free([first.number])
    assert ledger.reserve("a", GRAIN, 1.0).path != first.path, "one more than twice as large is not wasted on it"
    again = ledger.reserve("a", 2 * GRAIN, 1.0)
    assert again.path == first.path and again.number != first.number and again.size == 3 * GRAIN
