"""Of several failures of a stage the root cause is reported: by kind and rank, whatever words a backend uses."""

from __future__ import annotations

import pickle
from itertools import permutations

import pytest
import ray
import torch
import torch.distributed as dist

from distqueue import QueueClosed
from distqueue.errors import JournalFull, PutTooLarge
from fusion.colocate.failures import StageFailed, ships_failures
from fusion.colocate.phases import PhaseError
from fusion.ep_switch import SwitchError
from fusion.ep_switch.outcome import SwitchFailure
from fusion.npu.failures import AbortedOnAllRanks, CollectiveFailed, FailureKind, OutOfMemory, RankFailure
from stalesync.cards.card import STAGES, Card
from stalesync.cards.stage_calls import (
    BESIDE,
    Reported,
    RunningStage,
    first_of_each_card,
    gather_causes,
    gather_failures,
)
from stalesync.process.failures import CardFailed, FailedStage, QueueFailed, root_cause

HCCL = "EI0002: [PID: 4711] The wait execution of the Notify register times out. Remote Rank(0)"
NCCL = "NCCL communicator was aborted on rank 0. Original reason for failure was: unhandled system error"
OWN = RankFailure(3, "optimizer", FailureKind.FAILED, "ValueError", "no such shape")


class Unpicklable(Exception):
    def __init__(self, one, other):
        super().__init__("only the message")
        self.handle = lambda: (one, other)


@ships_failures("train")
class Worker:
    def __init__(self, rank, error):
        self.rank, self.error = rank, error

    def train(self):
        raise self.error


def shipped(rank, error):
    """What the controller gets of a worker's exception."""
    with pytest.raises(StageFailed) as caught:
        Worker(rank, error).train()
    remote = pickle.loads(pickle.dumps(caught.value))
    return FailedStage.of(ray.exceptions.RayTaskError("train", remote.trace, remote), rank=rank, stage="train")


def died(rank):
    return FailedStage.of(ray.exceptions.RayActorError(), rank=rank, stage="train")


def reported(*failed):
    """The error of the root cause, the same in whatever order failures come in."""
    errors = {str(root_cause(order).error()): root_cause(order).error() for order in permutations(failed)}
    assert len(errors) == 1
    return next(iter(errors.values()))


@pytest.mark.parametrize("words", [HCCL, NCCL, "anything at all", ""])
@pytest.mark.parametrize("type_", [dist.DistBackendError, dist.DistNetworkError, ConnectionResetError])
def test_a_rank_whose_collective_fails_is_not_blamed_for_another_ones_error(words, type_):
    others = [shipped(rank, type_(words)) for rank in (0, 1, 2)]
    error = reported(*others, shipped(3, ValueError("gloo: Connection refused")))
    assert isinstance(error, CardFailed)
    assert str(error).startswith("rank 3 failed in stage 'train': ValueError: gloo: Connection refused\n")
    assert "test_root_cause.py" in str(error), "with the trace"


def test_a_rank_that_died_is_named_before_all_others():
    error = reported(shipped(0, dist.DistBackendError(HCCL)), shipped(1, ValueError("a consequence, perhaps")), died(2))
    assert str(error) == "rank 2 died in stage 'train' (killed, out of host memory, or crashed)"


def test_of_failures_of_one_kind_the_lowest_ranks_is_named():
    error = reported(*(shipped(rank, ValueError(f"of rank {rank}")) for rank in (2, 1, 3)))
    assert str(error).startswith("rank 1 failed in stage 'train': ValueError: of rank 1\n")
    assert str(reported(died(2), died(1))).startswith("rank 1 died in stage 'train'")


@pytest.mark.parametrize("type_", [AbortedOnAllRanks, SwitchError])
def test_of_ranks_that_abort_together_the_one_that_failed_is_named(type_):
    failure = SwitchFailure(**OWN.to_json(), round=2) if type_ is SwitchError else OWN
    error = reported(*(shipped(rank, type_([failure])) for rank in range(5)))
    assert str(error).startswith(f"rank 3 failed in stage 'train': {type_.__name__}: ")
    assert "aborted on all cards: rank 3 failed in " in str(error)


def test_out_of_memory_keeps_its_fields_on_the_way():
    memory = RankFailure.of(torch.OutOfMemoryError("8 GiB"), rank=1, stage="kv", bytes_by_owner={"kv": 1 << 30})
    failed = shipped(1, OutOfMemory("train", memory))
    assert (failed.failure.kind, failed.failure.rank) == (FailureKind.OUT_OF_MEMORY, 1)
    assert failed.failure.bytes_by_owner == {"kv": 1 << 30}
    others = [shipped(rank, AbortedOnAllRanks([memory])) for rank in (0, 2)]
    assert "rank 1 failed in stage 'train': OutOfMemory: rank 1 is out of memory" in str(reported(failed, *others))


def test_an_exception_that_cannot_be_pickled_travels_as_data():
    assert "rank 2 failed in stage 'train': Unpicklable: only the message" in str(
        reported(shipped(2, Unpicklable(1, 2)))
    )


def test_a_queue_that_closed_is_named_not_the_rank_that_noticed():
    error = reported(shipped(1, QueueClosed("the core died")), shipped(0, dist.DistBackendError(NCCL)))
    assert isinstance(error, QueueFailed)
    assert str(error).startswith("the queue has failed: the core died (on rank 1 in stage 'train')")


def test_a_full_disk_of_the_queue_is_named_without_the_advice_to_have_a_journal():
    error = reported(shipped(1, JournalFull("journal /runs/queue: the disk is full: 0 bytes are free")))
    assert str(error).endswith("are free (on rank 1 in stage 'train')") and isinstance(error, QueueFailed)


def test_a_put_beyond_the_bound_of_the_queue_is_one_line_that_names_the_key():
    error = reported(shipped(1, PutTooLarge("a put of 8,873 bytes: increase queue.max_bytes")))
    assert str(error).endswith("PutTooLarge: a put of 8,873 bytes: increase queue.max_bytes") and "\n" not in str(error)
    assert isinstance(error, CardFailed) and "PutTooLarge" in error.trace


def test_a_queue_that_closed_during_a_control_call_is_named_too():
    closed = QueueClosed("its actor has ended")
    failed = FailedStage.of(ray.exceptions.RayTaskError("submit", "trace", closed), rank=1, stage="submit")
    error = failed.error()
    assert isinstance(error, QueueFailed) and "(on rank 1 in stage 'submit')" in str(error)


def failed(rank, stage, kind=FailureKind.FAILED):
    return FailedStage(RankFailure(rank, stage, kind, "ValueError", "no such shape"))


def begun(*stages):
    """Stages that were begun one after the other on three cards."""
    return [RunningStage(stage, (0, 1, 2), {}, begun_s=float(at_s)) for at_s, stage in enumerate(stages)]


def test_of_stages_begun_one_behind_the_other_on_a_card_the_first_that_failed_counts():
    to_infer, generate, to_train = begun("switch", "generate", "switch")
    switch, peer = failed(2, "switch"), failed(0, "switch", FailureKind.PEER_FAILED)
    behind = [Reported(failed(rank, stage.stage), stage) for stage in (generate, to_train) for rank in (0, 2)]
    for order in permutations([Reported(switch, to_infer), Reported(peer, to_infer), *behind]):
        assert {*first_of_each_card(order)} == {switch, peer}
        assert root_cause(first_of_each_card(order)) is switch
    other = Reported(failed(1, "generate"), generate)
    found = first_of_each_card([*behind, other, Reported(switch, to_infer)])
    assert {*found} == {behind[0].failed, other.failed, switch}


def test_a_stage_beside_others_hides_no_failure_and_is_hidden_by_none():
    reported = [Reported(failed(0, one.stage), one) for one in begun("save", "save_drafts", "train", "receive")]
    assert first_of_each_card(reported) == [one.failed for one in reported]


def test_stages_run_beside_others_in_the_concurrency_groups_of_a_card():
    groups = {name: getattr(getattr(Card, name), "__ray_concurrency_group__", "") for name in STAGES}
    assert {name for name, group in groups.items() if group} == BESIDE


@pytest.mark.parametrize("late", [True, False])
def test_a_host_that_is_lost_is_waited_for_although_stages_behind_the_one_it_ran_have_failed(late, monkeypatch):
    """The other cards notice first, and refuse their next stage at once."""
    monkeypatch.setattr("stalesync.cards.stage_calls.GATHER_FAILURES_S", 0.1)
    switch, generate = begun("switch", "generate")
    generate.pending = {"behind 0": 0, "behind 1": 1}
    switch.pending = {"peer 1": 1, "lost": 2}
    due = [["behind 0", "behind 1", "peer 1"], *[[]] * (4 if late else 0), ["lost"]]
    monkeypatch.setattr("stalesync.cards.stage_calls.ray.wait", lambda refs, timeout: (due.pop(0) if due else [], None))
    clock = iter(range(99))
    monkeypatch.setattr("stalesync.cards.stage_calls.time.monotonic", lambda: next(clock) / 20)

    def get(ref):
        errors = {"lost": ray.exceptions.RayActorError(), "peer 1": CollectiveFailed("connection closed by peer")}
        raise errors.get(ref, PhaseError("cannot generate in phase broken"))

    monkeypatch.setattr("stalesync.cards.stage_calls.ray.get", get)
    first = FailedStage(RankFailure(0, "switch", FailureKind.PEER_LOST, "RuntimeError", "connection closed by peer"))
    cause = root_cause(gather_failures(first, [switch, generate]))
    assert (cause.failure.rank, cause.failure.stage, cause.failure.kind) == (2, "switch", FailureKind.DIED)


@pytest.mark.parametrize(
    ("errors", "stages"),
    [
        ({"generate": ray.exceptions.RayActorError(), "switch": ray.exceptions.RayActorError()}, ["generate"]),
        ({"generate": CollectiveFailed("connection closed by peer")}, ["submit"]),
        ({"generate": None}, ["submit"]),
        ({}, ["submit"]),
    ],
)
def test_the_stage_that_a_card_ran_is_named_before_a_control_call_if_it_failed_by_itself(errors, stages, monkeypatch):
    monkeypatch.setattr("stalesync.cards.stage_calls.GATHER_FAILURES_S", 0.05)
    monkeypatch.setattr("stalesync.cards.stage_calls.ray.wait", lambda refs, timeout: ([*errors.keys() & refs], None))

    def get(ref):
        if error := errors[ref]:
            raise error

    monkeypatch.setattr("stalesync.cards.stage_calls.ray.get", get)
    generate, switch = begun("generate", "switch")
    generate.pending, switch.pending = {"generate": 1}, {"switch": 1}
    call = FailedStage.of(ray.exceptions.RayActorError(), rank=1, stage="submit")
    assert [one.failure.stage for one in gather_causes(call, [generate, switch])] == stages
