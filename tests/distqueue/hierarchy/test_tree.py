from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distqueue.hierarchy.tree import Member, Tree, plan_tree
from tests.distqueue.hierarchy.reads import flat_reads, leader_reads, requests

NAMES = "prompt", "response", "advantage", "behaviour_logprobs", "ref_logprobs"
NEEDS = st.frozensets(st.sampled_from(NAMES))
CHAIN = st.integers(0, len(NAMES)).map(lambda size: frozenset(NAMES[:size]))

FIRST, LAST = frozenset({"prompt", "response"}), frozenset({"response", "advantage", "behaviour_logprobs"})


def groups(needs: st.SearchStrategy) -> st.SearchStrategy:
    """Members of a group on up to seven machines, dealt out in any way."""
    one = st.tuples(st.sampled_from("abcdefg"), needs)
    return st.lists(one, min_size=1, max_size=40).map(
        lambda found: [Member(rank, place, columns) for rank, (place, columns) in enumerate(found)]
    )


def replica(tp: int, pp: int, per_machine: int) -> list[Member]:
    """Stage by stage, as a trainer numbers them."""
    return [
        Member(rank, str(rank // per_machine), {0: FIRST, pp - 1: LAST}.get(rank // tp, frozenset()))
        for rank in range(tp * pp)
    ]


def machines_of(members: list[Member]) -> dict[str, list[Member]]:
    return {place: [m for m in members if m.place == place] for place in {m.place for m in members}}


def subtree(tree: Tree, rank: int) -> set[int]:
    return {rank}.union(*(subtree(tree, edge.child) for edge in tree.outgoing(rank)))


def rounds(count: int) -> int:
    """ceil(log2 count)"""
    return (count - 1).bit_length()


@given(groups(NEEDS))
def test_every_rank_but_the_leader_has_one_parent_which_comes_first(members):
    tree = plan_tree(members)
    reached = [0]
    for edge in tree.edges:
        assert edge.parent in reached and edge.child not in reached
        reached.append(edge.child)
    assert sorted(reached) == [member.rank for member in members]
    assert tree.incoming(0) is None and all(tree.incoming(edge.child) is edge for edge in tree.edges)
    assert plan_tree(members[::-1]) == tree, "all ranks plan the same tree"


@given(groups(NEEDS))
def test_one_edge_leads_into_every_other_machine(members):
    tree = plan_tree(members)
    place = {member.rank: member.place for member in members}
    entered = sorted(place[edge.child] for edge in tree.edges if place[edge.parent] != place[edge.child])
    assert entered == sorted(set(place.values()) - {place[0]})


@given(groups(NEEDS))
def test_depth_and_children_are_logarithmic(members):
    tree, machines = plan_tree(members), machines_of(members)
    slow = rounds(len(machines))
    for member in members:
        fast = rounds(len(machines[member.place]))
        assert len(tree.outgoing(member.rank)) <= slow + fast
        path, edge = [], tree.incoming(member.rank)
        while edge is not None:
            path.append(members[edge.parent].place != members[edge.child].place)
            edge = tree.incoming(edge.parent)
        crossings = path.count(True)
        assert crossings <= slow and len(path) - crossings <= fast
        assert path == sorted(path), "to the machine first, then on it"


@given(groups(NEEDS))
def test_an_edge_carries_exactly_what_is_needed_below_it(members):
    tree = plan_tree(members)
    for edge in tree.edges:
        below = subtree(tree, edge.child)
        assert edge.columns == frozenset().union(*(member.columns for member in members if member.rank in below))


@given(groups(CHAIN))
def test_needs_that_contain_one_another_carry_nothing_idle(members):
    check_nothing_idle(members)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7, 8, 16])
def test_the_stages_of_a_trainer_carry_nothing_idle(tp, pp):
    """Their needs do not contain one another, yet nothing need be carried in vain: on one machine, or a stage each."""
    for per_machine in (tp, tp * pp):
        check_nothing_idle(replica(tp, pp, per_machine))


def check_nothing_idle(members):
    tree, machines = plan_tree(members), machines_of(members)
    for edge in tree.edges:
        member = members[edge.child]
        on_its_machine = frozenset().union(*(other.columns for other in machines[member.place]))
        assert edge.columns <= (on_its_machine if members[edge.parent].place != member.place else member.columns)


def test_a_relay_is_who_needs_most_of_its_machine():
    members = [Member(0, "a", FIRST), Member(1, "b", frozenset()), Member(2, "b", LAST), Member(3, "b", FIRST)]
    edges = plan_tree(members).edges
    (slow,) = (edge for edge in edges if members[edge.parent].place != members[edge.child].place)
    assert slow.child == 2 and slow.columns == FIRST | LAST


@given(groups(NEEDS), st.fixed_dictionaries({name: st.integers(0, 1 << 40) for name in NAMES}))
def test_what_leaves_the_queue(members, nbytes):
    flat, leader = flat_reads(members, nbytes), leader_reads(members, nbytes)
    assert (flat.requests, leader.requests) == (len(members), 1)
    for name in NAMES:
        readers = sum(name in member.columns for member in members)
        flat = flat._replace(nbytes=flat.nbytes - readers * nbytes[name])
        leader = leader._replace(nbytes=leader.nbytes - (readers > 0) * nbytes[name])
    assert flat.nbytes == leader.nbytes == 0


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_requests_fall_to_one_of_every_tp_times_pp(tp, pp, dp):
    flat, leader = requests(tp * pp * dp, tp * pp)
    assert flat == leader * tp * pp and leader == dp


def test_tp8_pp16_asks_once_where_128_would():
    nbytes = {"prompt": 10, "response": 100, "advantage": 1, "behaviour_logprobs": 50, "ref_logprobs": 50}
    members = replica(8, 16, 16)
    assert flat_reads(members, nbytes) == (128, 8 * (110 + 151)) and leader_reads(members, nbytes) == (1, 161)
    assert requests(128 * 3, 128) == (384, 3)
    with pytest.raises(ValueError, match="130 ranks in groups of 128"):
        requests(130, 128)


def test_stages_that_need_the_same_are_neighbours():
    """TP2 PP2 on one machine: each stage hears from one rank of the first."""
    edges = {(edge.parent, edge.child): edge.columns for edge in plan_tree(replica(2, 2, 4)).edges}
    assert edges == {(0, 2): LAST, (0, 1): FIRST, (2, 3): LAST}
