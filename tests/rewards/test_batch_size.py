"""The invariants of `fusion.rewards.batch_size`."""

from hypothesis import given
from hypothesis import strategies as st

from fusion.rewards.batch_size import BATCH_S, MAX_BATCH, MIN_BATCH, ScoringBatch

SECONDS = st.floats(0, 1, allow_nan=False)


@given(st.integers(1, MAX_BATCH), SECONDS)
def test_samples_that_have_arrived_are_scored_in_few_batches(num_samples, seconds_each):
    size, left, batches = ScoringBatch(), num_samples, 0
    while left:
        count = min(left, size.count)
        left, batches = left - count, batches + 1
        size.observe(count, count * seconds_each)
    assert batches <= 8 + num_samples * seconds_each / BATCH_S


@given(SECONDS)
def test_a_batch_takes_no_longer_than_it_should(seconds_each):
    size = ScoringBatch()
    for _ in range(40):
        assert MIN_BATCH <= size.count <= MAX_BATCH
        took_s = size.count * seconds_each
        assert took_s <= 2 * BATCH_S or size.count == MIN_BATCH
        size.observe(size.count, took_s)


@given(st.lists(st.tuples(st.integers(1, 9000), SECONDS)))
def test_a_batch_that_was_not_full_does_not_make_the_next_one_larger(batches):
    size = ScoringBatch()
    for num_samples, seconds in batches:
        before = size.count
        size.observe(min(num_samples, before), seconds)
        assert MIN_BATCH <= size.count <= MAX_BATCH
        if num_samples < before:
            assert size.count <= before
