"""Columns of samples: the values of each in order, those that are kept, and no reference that outlives a step."""

import weakref

from hypothesis import given
from hypothesis import strategies as st

from fusion.rewards import RewardOutcome
from stalesync.loop.sample_columns import SampleColumns
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample

NUMBERS = st.integers(0, 9)
OUTCOMES = st.builds(RewardOutcome, NUMBERS.map(float)) | st.just(RewardOutcome(None, "raised"))


@st.composite
def samples_of_groups(draw):
    samples = []
    for number, outcome in enumerate(draw(st.lists(OUTCOMES, max_size=8))):
        prompt = Prompt(f"g{number // 3}", (1, 2), "1+1=", "2")
        sample = Sample(f"{prompt.id}/{number}", prompt, "2", *draw(st.tuples(NUMBERS, NUMBERS)))
        sample.oldest, sample.newest, sample.outcome = *draw(st.tuples(NUMBERS, NUMBERS)), outcome
        sample.cut, sample.observed_tokens = draw(st.booleans()), draw(st.integers(0, sample.response_tokens))
        samples.append(sample)
    return samples


def rows(columns):
    lengths = columns.prompt_tokens, columns.response_tokens, columns.sampled_tokens
    fields = columns.oldest, columns.newest, columns.cut, columns.rewards, columns.errors, columns.tokens
    return list(zip(columns.ids, columns.groups, *lengths, *fields, strict=True))


def row(one):
    versions, outcome = (one.oldest, one.newest), (one.outcome.reward, one.outcome.error)
    lengths = one.prompt_tokens, one.response_tokens, one.response_tokens - one.observed_tokens
    return (one.id, one.prompt.id, *lengths, *versions, one.cut, *outcome, one.tokens)


@given(samples_of_groups(), st.data())
def test_columns_have_the_values_of_the_samples_that_are_kept_in_order(samples, data):
    columns = SampleColumns.of(samples)
    assert rows(columns) == [row(one) for one in samples] and len(columns) == len(samples)
    kept = data.draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples)))
    chosen = columns.where(kept)
    assert list(chosen.samples) == [one for one, keeps in zip(samples, kept, strict=True) if keeps]
    assert rows(chosen) == [row(one) for one in chosen.samples]
    assert rows(columns.without_errors) == [row(one) for one in samples if one.outcome.error is None]


@given(samples_of_groups(), st.data())
def test_rows_of_a_group_begin_with_the_prompt_of_the_row_before(samples, data):
    for sample in samples:
        if branches := data.draw(st.just([]) | st.lists(st.integers(1, 20), min_size=2, max_size=3)):
            sample.row_tokens = tuple(branches)
    columns = SampleColumns.of(samples)
    groups = [sample.prompt.id for sample in samples for _ in sample.rows]
    prompts = [sample.prompt_tokens for sample in samples for _ in sample.rows]
    wanted = [
        min(prompt, tokens) if index and groups[index - 1] == groups[index] else 0
        for index, (prompt, tokens) in enumerate(zip(prompts, columns.row_tokens, strict=True))
    ]
    assert columns.row_prefixes == wanted


@given(samples_of_groups())
def test_columns_are_freed_when_their_step_ends_before_garbage_is_collected(samples):
    columns = SampleColumns.of(samples)
    assert columns.tokens is columns.tokens and len(columns.without_errors) <= len(columns)
    freed = weakref.ref(columns)
    del columns
    assert freed() is None
