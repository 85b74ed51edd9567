"""Which deaths are mended, and what survives of an engine's requests."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.colocate import Deployment
from fusion.npu.failures import FailureKind, RankFailure
from fusion.rollout import Entry
from fusion.rollout.types import parse_row, row_of
from stalesync.policy.engine_deaths import IDLE, EngineDeaths, recover

SEPARATE = Deployment(train=(0, 1), generate=(2, 3, 4, 5), name="separate")
HYBRID = Deployment(train=(0, 1), generate=(0, 1, 2, 3, 4, 5), name="hybrid")


def failure(rank, kind=FailureKind.DIED, stage="generate"):
    return RankFailure(rank=rank, stage=stage, kind=kind, error="", message="")


def deaths(deployment=SEPARATE, max_restarts=9):
    return EngineDeaths.of(deployment, deployment.engines(2), max_restarts)


def test_an_engine_of_cards_that_only_generate_is_replaced_whichever_of_them_has_died():
    for deployment, first in ((SEPARATE, 0), (HYBRID, 1)):
        assert deaths(deployment).observe_failures([failure(3)], {3: {"generate"}}) == [first]
        assert deaths(deployment).observe_failures([failure(4), failure(2)], {4: {IDLE}}) == [first, first + 1]
        lost = failure(2, FailureKind.PEER_LOST)
        assert deaths(deployment).observe_failures([lost, failure(3)], {2: {"generate"}}) == [first]
        assert deaths(deployment).watched == [2, 3, 4, 5]
        assert deaths(deployment).observe_failures([failure(5)], {4: {"answer"}, 5: {"answer"}}) == [first + 1]


def test_what_else_fails_ends_the_run_and_an_engine_is_not_replaced_while_others_wait_for_it():
    for failures in ([failure(0)], [failure(0), failure(2)], [failure(2, FailureKind.FAILED)]):
        for deployment in (SEPARATE, HYBRID):
            assert not deaths(deployment).observe_failures(failures, {}) and not deaths().why_not(failures, {})
    trainer = failure(0, FailureKind.OUT_OF_MEMORY)
    assert not deaths().observe_failures([trainer, failure(2)], {2: {"generate"}})
    lost = failure(0, FailureKind.PEER_LOST, "switch")
    stages = {0: {"switch"}, 2: {"generate"}, 3: {"generate", "receive"}}
    assert not deaths(HYBRID).observe_failures([lost, failure(2)], stages)
    assert "while its cards run stage 'receive'" in deaths(HYBRID).why_not([lost, failure(2)], stages)
    assert deaths(HYBRID).observe_failures([failure(4)], stages), "the other engine waits for nobody"
    assert deaths().observe_failures([failure(2)], {2: {"snapshot_drafts"}})
    assert "while its cards run stage 'save_drafts'" in deaths().why_not([failure(2)], {2: {"save_drafts"}})
    none = deaths(max_restarts=0)
    assert not none.observe_failures([failure(2)], {}) and not none.watched and not none.why_not([failure(2)], {})


@pytest.mark.parametrize("stage", ["switch", "receive"])
def test_weights_are_sent_again_where_no_card_has_given_up_its_own(stage):
    stages = {0: {"switch"}, 1: {"switch"}, 2: {"generate", stage}, 3: {stage}, 4: {stage}, 5: {stage}}
    dead = failure(3, stage=stage)
    for kind in (FailureKind.PEER_LOST, FailureKind.PEER_FAILED):
        others = [failure(0, kind, "switch"), failure(2, kind, stage), failure(4, kind, stage)]
        assert deaths().observe_failures([dead, *others], stages) == [0] and not deaths(HYBRID).observe_failures(
            [dead, *others], stages
        )
    assert deaths().observe_failures([dead, failure(4, stage=stage)], stages) == [0, 1]
    for cause in (failure(1, stage="switch"), failure(1, FailureKind.FAILED, "switch")):
        assert not deaths().observe_failures([dead, cause], stages), "a trainer has failed by itself"
    assert not deaths().observe_failures([dead, failure(1, FailureKind.PEER_LOST, "train")], stages)


@given(st.integers(0, 4), st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), max_size=12))
def test_no_more_engines_are_replaced_than_allowed_and_none_with_a_card_that_trains(most, events):
    state = deaths(HYBRID, most)
    for ranks in events:
        before = state.num_restarts
        engines = state.observe_failures([failure(rank) for rank in ranks], {})
        assert state.num_restarts == before + len(engines) <= most
        assert set(engines) == ({rank // 2 for rank in ranks} if engines else set()) and 0 not in engines
        if not engines and min(ranks) > 1:
            assert f"run.max_engine_restarts={most}" in state.why_not([failure(rank) for rank in ranks], {}) or not most


request = st.tuples(
    st.integers(0, 6),  # tokens that are known here
    st.sets(st.integers(1, 4), max_size=1),  # … and that the queue has besides
    st.booleans(),  # whether the earlier row was dropped already
    st.booleans(),  # whether its sample is in the queue
)


@given(st.lists(request, max_size=8), st.integers(0, 5))
def test_every_request_is_finished_or_returned_once_with_the_longest_row_that_the_queue_holds(requests, version):
    entries, rows, finished = [], {}, set()
    for number, (known, more, dropped, done) in enumerate(requests):
        id = f"g{number}/0"
        earlier = row_of(id, known) if known else ""
        entries.append(Entry(id, f"g{number}", 3, 100, generated=known, earlier=earlier, oldest=0 if known else -1))
        held = {known} if known and not (dropped and (more or done)) else set()
        rows[id] = sorted(held | {known + one for one in more}, reverse=True)
        if done:
            finished.add(id)
    found = recover(entries, finished=finished, rows=rows, version=version)
    returned = {one.id: one for one in found.suspended}
    assert len(returned) == len(found.suspended) and found.num_finished == len(finished)
    assert returned.keys() == {entry.id for entry in entries} - finished
    kept = set()
    for entry in entries:
        if one := returned.get(entry.id):
            assert one.generated == max(rows[entry.id], default=entry.generated) >= entry.generated
            assert one.earlier == (row_of(entry.id, one.generated) if one.generated else "")
            gained = one.generated > entry.generated
            assert one.versions == ((0 if entry.generated else version, version) if gained else None)
            kept |= {one.earlier} - {""}
    held = {row_of(id, tokens) for id, counts in rows.items() for tokens in counts}
    assert sorted(found.dropped) == sorted(held - kept)
    assert {parse_row(row)[0] for row in held} <= rows.keys()


def test_a_row_that_the_queue_has_lost_is_left_to_the_next_engine_which_reports_it():
    entry = Entry("g/0", "g", 3, 100, generated=4, earlier="g/0~4", oldest=1, newest=2)
    (one,) = recover([entry], finished=set(), rows={}, version=2).suspended
    assert (one.generated, one.earlier, one.versions) == (4, "g/0~4", None)


def test_the_decision_loads_neither_ray_nor_torch():
    code = "import sys, stalesync.policy.engine_deaths; print(sorted({'ray', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_conversation_goes_on_behind_its_observation_or_is_away_where_its_turn_had_ended():
    said = dict(generated=7, earlier="g/0~4", oldest=1, newest=2, observation=3)
    entries = [Entry(f"g/{member}", "g", 3, 100, **said | {"earlier": f"g/{member}~4"}) for member in range(3)]
    rows = {"g/0": [4], "g/1": [4, 9], "g/2": [9]}
    found = recover(entries, finished=set(), rows=rows, version=2, turns={"g/0~4", "g/1~4", "g/1~9"})
    assert [(one.generated, one.earlier, one.turn) for one in found.suspended] == [
        (7, "g/0~4", False),
        (9, "g/1~9", True),
        (9, "g/2~9", False),
    ]
    assert found.dropped == ["g/1~4"]
