"""Columns of the queue as the trainer's sequences, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from distqueue import PackedBatch
from distqueue.hierarchy import Received
from fusion.colocate.samples.sequences import (
    REFERENCE,
    empty_samples,
    response_column,
    summed_log_ratios,
    to_sequences,
    tokens_of_samples,
)
from fusion.rollout.packing import SAMPLED

LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5)


def samples_of(lengths: list[tuple[int, int]]) -> PackedBatch:
    rows = [torch.arange(prompt + response) + 10 * row for row, (prompt, response) in enumerate(lengths)]
    parts = [row.split(length) for row, length in zip(rows, map(list, lengths), strict=True)]
    columns = {"prompt": [prompt for prompt, _ in parts], "response": [response for _, response in parts]}
    return PackedBatch.from_samples([str(row) for row in range(len(rows))], columns)


@given(LENGTHS)
def test_a_column_of_results_has_the_values_at_each_samples_response(lengths):
    batch = samples_of(lengths)
    received = Received.of(batch)
    sequences = to_sequences(received)
    column = response_column(sequences.tokens.float(), sequences, received)
    packed = PackedBatch.from_samples(batch.ids, {REFERENCE: column})
    for row in range(len(batch)):
        assert packed[REFERENCE][row].tolist() == batch["response"][row].tolist()


@given(LENGTHS, st.data())
def test_of_a_conversation_sampled_tokens_are_trained_and_compared_with_the_reference(lengths, data):
    batch = samples_of(lengths)
    masks = [data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) for _, size in lengths]
    behaviour = [torch.full((size,), -1.0) for _, size in lengths]
    columns = {SAMPLED: [torch.tensor(mask, dtype=torch.bool) for mask in masks], "behaviour_logprobs": behaviour}
    columns |= {name: [batch[name][row] for row in range(len(batch))] for name in batch.columns}
    received = Received.of(PackedBatch.from_samples(batch.ids, columns))
    sequences = to_sequences(received)
    trained = [mask.tolist() for mask in sequences.loss_mask.split(sequences.lengths)]
    assert trained == [[False] * prompt + mask for (prompt, _), mask in zip(lengths, masks, strict=True)]
    reference = torch.where(sequences.loss_mask, -3.0, -50.0)
    assert summed_log_ratios(sequences, reference) == [2.0 * sum(mask) for mask in masks]
    column = response_column(sequences.tokens.float(), sequences, received)
    assert column.buffer.tolist() == batch["response"].buffer.tolist()
    last = [max((place + 1 for place, value in enumerate(mask) if value), default=0) for mask in masks]
    ends = [prompt * (end > 0) + end for (prompt, _), end in zip(lengths, last, strict=True)]
    cut = sequences.until_trained()
    assert cut.lengths == ends and int(cut.loss_mask.sum()) == sum(map(sum, masks))
    whole = [tokens[:end].tolist() for tokens, end in zip(sequences.tokens.split(sequences.lengths), ends, strict=True)]
    assert [tokens.tolist() for tokens in cut.tokens.split(cut.lengths)] == whole


@given(LENGTHS)
def test_the_tokens_of_a_sample_are_its_prompt_and_response(lengths):
    batch = samples_of(lengths)
    expected = [(batch["prompt"][row].tolist(), batch["response"][row].tolist()) for row in range(len(batch))]
    assert [(prompt.tolist(), response.tolist()) for prompt, response in tokens_of_samples(batch)] == expected


def test_a_replica_may_have_no_samples():
    received = empty_samples(("prompt", "response"))
    assert tokens_of_samples(received.batch) == [] and to_sequences(received).rows == 0
