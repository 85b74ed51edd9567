"""Of several failures of a stage the root cause is reported: by kind and rank, whatever words a backend uses."""

from __future__ import annotations

import pickle
from itertools import permutations

import pytest
import ray
import torch
import torch.distributed as dist

from distqueue import QueueClosed
from fusion.colocate.failures import StageFailed, ships_failures
from fusion.ep_switch import SwitchError
from fusion.ep_switch.outcome import SwitchFailure
from fusion.npu.failures import AbortedOnAllRanks, FailureKind, OutOfMemory, RankFailure
from stalesync.failures import CardFailed, FailedStage, QueueFailed, root_cause
from stalesync.stage_calls import first_of_each_card

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


def test_a_queue_that_closed_during_a_control_call_is_named_too():
    closed = QueueClosed("its actor has ended")
    failed = FailedStage.of(ray.exceptions.RayTaskError("submit", "trace", closed), rank=1, stage="submit")
    error = failed.error()
    assert isinstance(error, QueueFailed) and "(on rank 1 in stage 'submit')" in str(error)


def failed(rank, stage, kind=FailureKind.FAILED):
    return FailedStage(RankFailure(rank, stage, kind, "ValueError", "no such shape"))


def test_of_stages_begun_one_behind_the_other_on_a_card_the_first_that_failed_counts():
    begun_s = {(rank, stage): at_s for at_s, stage in enumerate(["save", "switch", "generate"]) for rank in range(3)}
    switch, peer = failed(2, "switch"), failed(0, "switch", FailureKind.PEER_FAILED)
    behind = [failed(rank, "generate") for rank in (0, 2)]
    for order in permutations([switch, peer, *behind]):
        assert {*first_of_each_card(order, begun_s)} == {switch, peer}
        assert root_cause(first_of_each_card(order, begun_s)) is switch
    other = failed(1, "generate")
    assert {*first_of_each_card([*behind, other, switch], begun_s)} == {behind[0], other, switch}


def test_a_stage_beside_others_hides_no_failure_and_is_hidden_by_none():
    begun_s = {(0, "save"): 0.0, (0, "train"): 1.0, (0, "receive"): 2.0}
    stages = [failed(0, stage) for _, stage in begun_s]
    assert first_of_each_card(stages, begun_s) == stages
    unknown = failed(0, "prepare")
    assert first_of_each_card([unknown], {}) == [unknown]
