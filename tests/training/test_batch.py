from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.training import Sequences, plan_micro_batches, split_over_ranks
from fusion.training.batch import UNREAD
from fusion.training.division import split_groups
from tests.training.sequences import sequences_of

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


@given(LENGTHS, st.integers(1, 80))
def test_every_sequence_is_in_one_micro_batch_within_the_budget(lengths, budget):
    plan = plan_micro_batches(lengths, budget)
    assert sorted(i for batch in plan for i in batch) == list(range(len(lengths)))
    for batch in plan:
        sizes = [lengths[i] for i in batch]
        assert sizes == sorted(sizes)
        assert sum(sizes) <= budget or len(batch) == 1


@given(st.integers(0, 40), st.integers(1, 8), st.data())
def test_minibatches_are_those_of_all_groups_also_where_the_first_ones_came_before(number, minibatches, data):
    groups, before = [str(group) for group in range(number)], data.draw(st.integers(0, number))
    whole = split_groups(groups, minibatches)
    rest = split_groups(groups[before:], minibatches, before)
    assert [group for part in whole for group in part] == groups and len(whole) <= minibatches
    assert len({len(part) for part in whole[:-1]}) <= 1
    assert rest == [[group for group in part if int(group) >= before] for part in whole]


@given(LENGTHS, st.integers(1, 80))
def test_no_two_micro_batches_would_fit_into_one(lengths, budget):
    totals = sorted(sum(lengths[i] for i in batch) for batch in plan_micro_batches(lengths, budget))
    assert all(left + right > budget for left, right in pairwise(totals))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(30, 60))
def test_micro_batches_are_at_most_three_halves_of_the_fewest(lengths, budget):
    assert len(plan_micro_batches(lengths, budget)) <= 1.5 * fewest_bins(tuple(sorted(lengths)), budget, ())


def fewest_bins(lengths: tuple[int, ...], budget: int, free: tuple[int, ...]) -> int:
    if not lengths:
        return len(free)
    *rest, last = lengths
    choices = [free + (budget - last,)]
    for i, room in enumerate(free):
        if room >= last and room not in free[:i]:
            choices.append(free[:i] + (room - last,) + free[i + 1 :])
    return min(fewest_bins(tuple(rest), budget, choice) for choice in choices)


@given(LENGTHS, st.integers(1, 9))
def test_ranks_share_the_tokens_evenly(lengths, ranks):
    split = split_over_ranks(lengths, ranks)
    assert len(split) == ranks and all(part == sorted(part) for part in split)
    assert sorted(i for part in split for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in split]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    if len(lengths) >= ranks and all(lengths):
        assert all(split)


def test_prompts_and_responses_of_unequal_number_are_refused():
    with pytest.raises(ValueError, match="2 prompt_lengths and 1 response_lengths"):
        Sequences.from_packed([1, 2], [3])


def test_columns_lie_beside_the_tokens_they_belong_to():
    batch = sequences_of(
        [[5, 6], [7]],
        [[8], [9, 3, 4]],
        advantages=[1.0, -1.0],
        behaviour_logprobs=[[-0.1], [-0.2, -0.3, -0.4]],
        versions=[[2], [1, 1, 2]],
        trained=[True, True],
    )
    batch = replace(batch, version=2)
    assert batch.tokens.tolist() == [5, 6, 8, 7, 9, 3, 4]
    assert batch.lengths == [3, 4]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.loss_mask.tolist() == [False, False, True, False, True, True, True]
    assert batch.advantages.tolist() == [1, 1, 1, -1, -1, -1, -1]
    torch.testing.assert_close(batch.behaviour_logprobs, torch.tensor([0, 0, -0.1, 0, -0.2, -0.3, -0.4]))
    assert batch.ref_logprobs is None
    assert batch.versions.tolist() == [0, 0, 2, 0, 1, 1, 2] and batch.versions.dtype == torch.int32
    second = batch.select([1])
    assert second.versions.tolist() == [0, 1, 1, 2] and second.version == 2
    assert second.tokens.tolist() == [7, 9, 3, 4] and second.lengths == [4]
    assert batch.select([1, 0]).tokens.tolist() == [7, 9, 3, 4, 5, 6, 8]
    for nothing in (batch.select([]), sequences_of([], [], advantages=[])):
        assert nothing.tokens.shape == nothing.positions.shape == nothing.advantages.shape == (0,)
        assert nothing.tokens.dtype == torch.int64 and nothing.loss_mask.dtype == torch.bool


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_the_rows_of_sequences_are_those_between_their_starts_and_ends(lengths, data):
    batch = Sequences.from_packed(
        lengths, [0] * len(lengths), prompts=torch.arange(sum(lengths)), responses=torch.empty(0)
    )
    indices = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=12))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    rows = [row for i in indices for row in range(starts[i], starts[i] + lengths[i])]
    assert batch.rows_of(indices).tolist() == rows and batch.rows_of(indices).dtype is torch.int64
    chosen = batch.select(indices)
    assert chosen.tokens.tolist() == rows and chosen.lengths == [lengths[i] for i in indices]
    assert torch.equal(chosen.tokens, batch.select(indices, batch.rows_of(indices)).tokens)


def test_a_sample_can_be_left_out_of_the_loss():
    batch = sequences_of([[5], [6]], [[7, 8], [9]], trained=[False, True])
    assert batch.loss_mask.tolist() == [False, False, False, False, True]


def test_a_stage_of_a_pipeline_holds_what_it_looks_at():
    lengths, tokens = ([2, 1], [1, 3]), {"prompts": torch.tensor([5, 6, 7]), "responses": torch.tensor([8, 9, 3, 4])}
    first, middle = Sequences.from_packed(*lengths, **tokens), Sequences.from_packed(*lengths)
    last = Sequences.from_packed(*lengths, responses=tokens["responses"], advantages=torch.tensor([1.0, -1.0]))
    assert first.tokens.tolist() == [5, 6, 8, 7, 9, 3, 4]
    assert last.tokens.tolist() == [UNREAD, UNREAD, 8, UNREAD, 9, 3, 4]
    assert last.advantages.tolist() == [1, 1, 1, -1, -1, -1, -1]
    for stage in (first, middle.select([1, 0]).select([1, 0]), last):
        assert stage.lengths == [3, 4] and stage.rows == 7
        assert stage.loss_mask.tolist() == [False, False, True, False, True, True, True]
        assert stage.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    with pytest.raises(AssertionError, match="holds no tokens"):
        middle.tokens  # noqa: B018
    with pytest.raises(AssertionError, match="2 values for 4 tokens"):
        Sequences.from_packed(*lengths, ref_logprobs=torch.zeros(2))


def test_routing_lies_at_every_token_but_the_last_of_a_sequence():
    routing = torch.arange(1, 9, dtype=torch.uint8).view(4, 1, 2)
    batch = Sequences.from_packed([2, 0, 1], [1, 0, 2], routing=routing)
    assert batch.routing.dtype is torch.uint8 and batch.last_rows().tolist() == [2, 5]
    assert batch.routing[[0, 1, 3, 4]].equal(routing) and batch.select([2]).routing[:2].equal(routing[2:])
    with pytest.raises(AssertionError, match="3 values for 4 tokens"):
        Sequences.from_packed([2, 1], [1, 2], routing=routing[:3])
    nothing = Sequences.from_packed([], [], routing=torch.empty(0))
    assert nothing.routing.shape == (0,) and nothing.select([]).routing.shape == (0,)


def test_columns_that_do_not_fit_are_refused_by_name():
    with pytest.raises(AssertionError, match="2 values for 3 tokens"):
        Sequences.from_packed([1, 1], [1, 2], behaviour_logprobs=torch.zeros(2))
    with pytest.raises(ValueError, match=r"loss_mask has shape \[3\]; expected \[4\]"):
        Sequences(torch.zeros(4, dtype=torch.int64), [2, 2], torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="first token"):
        sequences_of([[]], [[3, 4]])


@given(st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=4), max_size=5), st.data())
def test_kept_ids_stay_with_their_tokens(sets_by_sample, data):
    flat = [ids for sets in sets_by_sample for ids in sets]
    batch = Sequences.from_packed(
        [1] * len(sets_by_sample),
        [len(sets) for sets in sets_by_sample],
        kept_counts=torch.tensor([len(ids) for ids in flat], dtype=torch.int32),
        kept_ids=torch.tensor([id for ids in flat for id in ids], dtype=torch.int32),
    )
    order = data.draw(st.permutations(range(len(sets_by_sample))))[: data.draw(st.integers(0, len(sets_by_sample)))]
    chosen = batch.select(order)
    kept = chosen.kept_at(chosen.loss_mask.nonzero().squeeze(1))
    assert [ids.tolist() for ids in kept.ids.split(kept.counts.tolist())] == [
        ids for index in order for ids in sets_by_sample[index]
    ]


def test_kept_ids_of_another_number_than_counted_are_refused():
    with pytest.raises(ValueError, match="kept_ids has 1 ids; expected 2, the sum of kept_counts"):
        Sequences.from_packed([1], [1], kept_counts=torch.tensor([2]), kept_ids=torch.tensor([5]))
