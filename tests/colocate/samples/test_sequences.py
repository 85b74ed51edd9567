"""Columns of the queue as the trainer's sequences, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from distqueue import PackedBatch
from distqueue.hierarchy import Received
from fusion.colocate.samples.sequences import REFERENCE, empty_samples, response_column, to_sequences, tokens_of_samples

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


@given(LENGTHS)
def test_the_tokens_of_a_sample_are_its_prompt_and_response(lengths):
    batch = samples_of(lengths)
    expected = [(batch["prompt"][row].tolist(), batch["response"][row].tolist()) for row in range(len(batch))]
    assert [(prompt.tolist(), response.tolist()) for prompt, response in tokens_of_samples(batch)] == expected


def test_a_replica_may_have_no_samples():
    received = empty_samples(("prompt", "response"))
    assert tokens_of_samples(received.batch) == [] and to_sequences(received).rows == 0
