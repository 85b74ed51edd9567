"""Which sequences share rows, where they are computed, and how they are divided: properties of all plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.model import Mesh
from fusion.model.prefixes import READS_OF_ROW, SHARE_PREFIXES, links, links_within, may_share, pays, rows_saved, runs
from fusion.model.shared_rows import Reads, SharedRows
from fusion.training import plan_micro_batches, split_over_ranks
from fusion.training.micro_batches import common_prefixes, split_micro_batches
from tests.training.sequences import sequences_of

SEQUENCES = st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12)
TREES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=20).map(
    lambda pairs: ([one for one, _ in pairs], common_of(pairs))
)
"""Lengths, and rows that each sequence shares with the one before it"""


def common_of(pairs):
    lengths = [0, *(one for one, _ in pairs)]
    return [min(common, *lengths[index : index + 2]) for index, (_, common) in enumerate(pairs)]


def batch_of(sequences):
    return sequences_of(sequences, [[] for _ in sequences])


@given(SEQUENCES)
def test_what_sequences_have_in_common_is_their_longest_common_prefix(sequences):
    common = common_prefixes(batch_of(sequences))
    assert len(common) == len(sequences)
    for index, found in enumerate(common):
        before = sequences[index - 1] if index else []
        assert before[:found] == sequences[index][:found]
        assert found == min(len(before), len(sequences[index])) or before[found] != sequences[index][found]


@given(SEQUENCES, st.data())
def test_with_routing_only_rows_with_equal_experts_are_shared_and_never_a_last_one(sequences, data):
    experts = [[data.draw(st.integers(0, 1)) for _ in one] for one in sequences]
    batch = batch_of(sequences)
    flat = torch.tensor([expert for one in experts for expert in one], dtype=torch.uint8)
    common = common_prefixes(replace(batch, routing=flat.view(-1, 1, 1)))
    tokens = [list(zip(one, of_one, strict=True)) for one, of_one in zip(sequences, experts, strict=True)]
    for index, found in enumerate(common[1:], 1):
        before, own = tokens[index - 1], tokens[index]
        longest = max(0, min(len(before), len(own)) - 1)
        assert before[:found] == own[:found] and (found == longest or before[found] != own[found])


@given(TREES, st.sampled_from(SHARE_PREFIXES))
def test_a_sequence_shares_at_most_what_it_has_in_common(tree, share):
    lengths, common = [10 * one for one in tree[0]], [10 * one for one in tree[1]]
    shared = links(lengths, common, share)
    wanted = {"on": lambda *_: True, "off": lambda *_: False, "auto": pays}[share]
    assert shared == [same if wanted(length, same) else 0 for length, same in zip(lengths, common, strict=True)]
    assert may_share(lengths, share) or not any(shared), "then no tokens are compared"


def test_the_cost_of_a_link_is_decided_from_lengths():
    assert pays(1024 + 64, 1024) and not pays(16 + 512, 16), "a long prompt pays, a short one before a long answer not"
    assert not any(pays(length, length) for length in range(65)), "nor does any prefix that a tile of a kernel holds"


@given(TREES, st.integers(1, 90))
def test_runs_hold_every_sequence_once_within_the_budget(tree, budget):
    lengths, shared = tree
    found = runs(lengths, shared, budget)
    assert [index for run, _ in found for index in run] == list(range(len(lengths)))

    def taken(run):
        """Computed rows, and copies: the second sequence makes those of the first, too."""
        copied = [lengths[index] + (lengths[run[0]] if index == run[1] else 0) for index in run[1:]]
        return lengths[run[0]] + sum(lengths[i] - shared[i] for i in run[1:]) + sum(n // READS_OF_ROW for n in copied)

    for run, size in found:
        assert size == taken(run)
        assert (size <= budget or len(run) == 1) and all(shared[i] for i in run[1:])
    for (before, _), (run, _) in zip(found, found[1:], strict=False):
        assert not shared[run.start] or taken(range(before.start, run.start + 1)) > budget


@given(TREES, st.integers(1, 90))
def test_micro_batches_hold_whole_runs_within_the_budget(tree, budget):
    lengths, shared = tree
    plan = plan_micro_batches(lengths, budget, shared)
    assert sorted(index for indices in plan for index in indices) == list(range(len(lengths)))
    by_start = {run.start: (run, rows) for run, rows in runs(lengths, shared, budget)}
    for indices in plan:
        members = [by_start[index] for index in indices if index in by_start]
        assert indices == [index for run, _ in members for index in run]
        rows = [rows for _, rows in members]
        assert rows == sorted(rows) and (sum(rows) <= budget or len(rows) == 1)


@given(TREES, st.sampled_from(SHARE_PREFIXES), st.integers(1, 900))
def test_what_a_plan_shares_is_what_its_micro_batches_share(tree, share, budget):
    """And what the cost model counts as saved is at most that, and more than nothing where sharing pays."""
    lengths, common = [10 * one for one in tree[0]], [10 * one for one in tree[1]]
    plan = plan_micro_batches(lengths, budget, links(lengths, common, share))
    shared = links_within(lengths, common, share, budget)
    for indices in plan:
        for before, index in zip([-2, *indices], indices, strict=False):
            assert not shared[index] or before == index - 1, "they are in one micro-batch, one behind the other"
    starts = [run.start for run, _ in runs(lengths, links(lengths, common, share), budget)]
    assert all(
        shared[index] == (0 if index in starts else links(lengths, common, share)[index])
        for index in range(len(lengths))
    )
    for length, same in zip(lengths, shared, strict=True):
        assert 0 <= rows_saved(length, same) <= same and (rows_saved(length, same) > 0) == pays(length, same)


@given(SEQUENCES, st.integers(1, 40))
def test_a_micro_batch_computes_every_distinct_row_of_its_runs(sequences, budget):
    batch = batch_of(sequences)
    places, batches = split_micro_batches(batch, budget, share="on", mesh=Mesh.single())
    for rows, micro in zip(places, batches, strict=True):
        assert torch.equal(micro.tokens, batch.tokens[rows])
        ids, positions = micro.computed(micro.tokens), micro.computed(micro.positions)
        assert len(ids) == micro.num_computed
        every = torch.arange(micro.rows)
        assert torch.equal(ids[micro.computed_at(every)], micro.tokens), "a shared row has the same token"
        assert torch.equal(positions[micro.computed_at(every)], micro.positions), "at the same position"


@given(TREES)
def test_a_row_is_computed_for_the_first_sequence_that_has_it(tree):
    lengths, shared = tree
    rows = SharedRows(lengths, shared)
    assert rows.count == sum(lengths) - sum(shared) == int(rows.own_N.sum())
    assert torch.equal(rows.row_N[rows.own_N], torch.arange(rows.count))
    assert int(rows.sequences_M.sum()) == sum(lengths) and bool((rows.sequences_M >= 1).all())
    by_sequence = rows.row_N.split(lengths) if lengths else []
    for index, common in enumerate(shared):
        if index:
            assert torch.equal(by_sequence[index][:common], by_sequence[index - 1][:common])


@given(st.lists(st.integers(0, 7), max_size=30), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_gradients_of_rows_that_are_read_several_times_are_summed(reads, dtype):
    x = torch.arange(24, dtype=dtype).view(8, 3).requires_grad_()
    rows = torch.tensor(reads, dtype=torch.int64)
    found = Reads(rows, "cpu")(x)
    assert torch.equal(found, x[rows])
    probe = torch.arange(found.numel(), dtype=dtype).view_as(found) / 8
    (gradient,) = torch.autograd.grad((found * probe).sum(), x)
    wanted = torch.zeros(8, 3, dtype=torch.float64).index_add(0, rows, probe.double())
    torch.testing.assert_close(gradient, wanted.to(dtype))


@given(TREES, st.integers(1, 6))
def test_trees_are_divided_over_ranks_at_least_as_well_as_single_sequences(tree, ranks):
    lengths, shared = tree
    split = split_over_ranks(lengths, ranks, shared)
    assert len(split) == ranks and all(part == sorted(part) for part in split)
    assert sorted(index for part in split for index in part) == list(range(len(lengths)))

    def most(division):
        return max(sum(lengths[i] - (shared[i] if i - 1 in part else 0) for i in part) for part in map(set, division))

    assert most(split) <= most(split_over_ranks(lengths, ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_siblings_stay_on_one_rank_where_there_are_groups_enough(ranks):
    shared = [0, *[100] * 7] * 8
    split = split_over_ranks([150] * 64, ranks, shared)
    assert all(len({index // 8 for index in part}) == 8 // ranks for part in split)


def test_a_single_group_is_divided_where_that_is_faster():
    split = split_over_ranks([300] * 8, 4, [0, *[100] * 7])
    assert sorted(map(len, split)) == [2, 2, 2, 2]
