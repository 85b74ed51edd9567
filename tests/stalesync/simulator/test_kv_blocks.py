"""The invariant of `stalesync.simulator.decoding`: the count equals that over all sequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stalesync.simulator.decoding import GrowingBlocks


@given(st.sampled_from([1, 2, 16]), st.lists(st.tuples(st.integers(1, 70), st.integers(0, 40), st.booleans())))
def test_blocks_are_those_of_all_sequences_at_any_step(size, changes):
    blocks, held, step = GrowingBlocks(size), [], 0
    for length, later, leaves in changes:
        step += later
        if leaves and held:
            length, since = held.pop(length % len(held))
            blocks.remove(length + step - since, step)
        else:
            held.append((length, step))
            blocks.add(length, step)
        for at in (step, step + 1, step + 7, step + 33):
            assert blocks.used(at) == sum(-(-(length + at - since) // size) for length, since in held)
    assert blocks.num_sequences == len(held)
