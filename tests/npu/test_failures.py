"""Failures as typed data: kinds by type, whatever the message says; one agreement for a group of ranks."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from fusion.npu.all_or_none import all_or_none, attempt, gather_json
from fusion.npu.failures import (
    AbortedOnAllRanks,
    CollectiveFailed,
    FailureKind,
    OutOfMemory,
    RankFailure,
    failures_in,
    kind_of,
    wait_for,
)
from tests.helpers import processes, run_ranks
from tests.machine import patience

HELD = {"weights": 3 << 20, "kv": 1 << 19}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("anything"), FailureKind.OUT_OF_MEMORY),
        (dist.DistBackendError("anything"), FailureKind.PEER_LOST),
        (dist.DistNetworkError("anything"), FailureKind.PEER_LOST),
        (ConnectionResetError("anything"), FailureKind.PEER_LOST),
        (CollectiveFailed("anything"), FailureKind.PEER_LOST),
        (RuntimeError("gloo: Connection closed by peer; DistNetworkError"), FailureKind.FAILED),
        (ValueError("NCCL error: OutOfMemoryError, the card held"), FailureKind.FAILED),
    ],
)
def test_the_type_decides_not_the_text(error, kind):
    assert kind_of(error) is kind


def test_what_a_collective_rejects_itself_is_told_from_what_it_loses():
    def raise_in(module, name):
        source = f"def {name}():\n    raise RuntimeError('any words of any backend')"
        space = {"__name__": module}
        exec(source, space)
        try:
            space[name]()
        except RuntimeError as error:
            return kind_of(error)

    assert raise_in("torch.distributed.distributed_c10d", "all_reduce") is FailureKind.PEER_LOST
    assert raise_in("torch.distributed.distributed_c10d", "init_process_group") is FailureKind.FAILED
    assert raise_in("torch.nn.functional", "linear") is FailureKind.FAILED


@dataclass
class Work:
    error: Exception

    def wait(self):
        raise self.error


def test_waiting_for_a_lost_peer_is_typed_and_memory_is_not_mistaken_for_it():
    with pytest.raises(CollectiveFailed, match="no words that anybody knows"):
        wait_for(Work(RuntimeError("no words that anybody knows")))
    with pytest.raises(torch.OutOfMemoryError):
        wait_for(Work(torch.OutOfMemoryError("gloo")))


def test_failures_survive_json_and_pickle():
    failure = RankFailure.of(torch.OutOfMemoryError("8 GiB"), rank=3, stage="optimizer", bytes_by_owner=HELD)
    assert RankFailure.from_json(json.loads(json.dumps(failure.to_json()))) == failure
    aborted = pickle.loads(pickle.dumps(AbortedOnAllRanks([failure])))
    assert aborted.failures == (failure,) and aborted.failure_of(3) == failure and aborted.failure_of(1) is None
    assert str(aborted) == (
        "aborted on all cards: rank 3 failed in optimizer: OutOfMemoryError: 8 GiB; "
        "HBM by owner: weights 3.0 MiB, kv 0.5 MiB"
    )
    memory = pickle.loads(pickle.dumps(OutOfMemory("train", failure)))
    assert (memory.rank, memory.stage, memory.bytes_by_owner) == (3, "train", HELD)
    assert str(memory).startswith("rank 3 is out of memory in stage 'train', optimizer; HBM by owner: weights 3.0 MiB")
    assert "lower training.token_budget" in str(memory) and "scripts/plan.py" in str(memory)
    assert failures_in(aborted, rank=0, stage="outer") == [failure], "an abort is passed on, not wrapped"


def agreeing(rank, device):
    def work():
        if rank == 1:
            raise torch.OutOfMemoryError("no room")
        if rank == 2:
            raise KeyError("c" * 5000)
        return rank

    held = torch.ones(1 << 20, device=device.torch_device)
    assert all_or_none(lambda: rank, group=dist.group.WORLD, rank=rank, stage="fine") == rank
    with pytest.raises(AbortedOnAllRanks) as caught:
        all_or_none(work, group=dist.group.WORLD, rank=rank, stage="loading", device=device)

    def nested():
        all_or_none(work, group=dist.group.WORLD, rank=rank, stage="loading", device=device)

    with pytest.raises(AbortedOnAllRanks) as again:
        all_or_none(nested, group=dist.group.WORLD, rank=rank, stage="outer")
    assert again.value.failures == caught.value.failures, "the first cause, once, not once more for every group"
    own_error = {1: torch.OutOfMemoryError, 2: KeyError}.get(rank, type(None))
    assert type(caught.value.__cause__) is own_error, "chained to what this rank raised itself"
    assert gather_json({"rank": rank, "text": "é" * rank}, dist.group.WORLD)[2] == {"rank": 2, "text": "éé"}
    del held
    return caught.value.failures


def test_what_fails_on_some_ranks_is_raised_on_all_with_its_type_stage_and_memory():
    first, second, third = run_ranks(agreeing, 3)
    assert first == second == third
    memory, key = first
    assert (memory.rank, memory.stage, memory.kind) == (1, "loading", FailureKind.OUT_OF_MEMORY)
    assert memory.bytes_by_owner["activations"] >= 4 << 20, "who held it when it ran out"
    assert (key.rank, key.kind, key.error, key.bytes_by_owner) == (2, FailureKind.FAILED, "KeyError", {})
    assert key.message == repr("c" * 5000)


def test_a_process_that_ends_during_the_work_and_the_agreement_is_no_failure_of_this_rank():
    def lost(*_: object):
        raise CollectiveFailed("its process has ended")

    with pytest.raises(CollectiveFailed):
        attempt(lost, describe=lambda error: [RankFailure.of(error, rank=0, stage="plan")], agree=lost)
    with pytest.raises(AbortedOnAllRanks, match="rank 0 failed in plan: KeyError: 1"):
        attempt(lambda: {}[1], describe=lambda error: [RankFailure.of(error, rank=0, stage="plan")], agree=lost)


COLLECTIVES = {
    "all_reduce": lambda t: dist.all_reduce(t),
    "broadcast": lambda t: dist.broadcast(t, src=2),
    "all_gather": lambda t: dist.all_gather_into_tensor(t.new_empty(3 * t.numel()), t),
    "all_to_all": lambda t: dist.all_to_all_single(t.clone(), t),
    "recv": lambda t: dist.recv(t, 2),
    "barrier": lambda t: dist.barrier(),
    "asynchronous": lambda t: wait_for(dist.all_reduce(t, async_op=True)),
    "wait": lambda t: dist.all_reduce(t, async_op=True).wait(),
    "batch": lambda t: [wait_for(work) for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, 2)])],
}


def bereaved(rank: int, folder: str, where: str, name: str) -> None:
    from fusion.npu import open_device

    torch.set_num_threads(1)
    device = open_device("emulated", index=rank)
    store = f"file://{folder}/store"
    dist.init_process_group(device.process_group_backend, init_method=store, rank=rank, world_size=3)
    tensor = torch.ones(3000, device="cpu" if where == "gloo" else device.torch_device)
    dist.all_reduce(tensor)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    kind = "no error"
    try:
        COLLECTIVES[name](tensor)
    except Exception as error:
        kind = kind_of(error).value
    with open(f"{folder}/{rank}", "w") as file:
        file.write(kind)
    os._exit(0)


QUICK = [("gloo", "all_reduce"), ("gloo", "asynchronous"), ("hccl", "wait")]
REST = [(where, name) for where in ("gloo", "hccl") for name in COLLECTIVES if (where, name) != ("gloo", "wait")]


@pytest.mark.parametrize(
    ("where", "name"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in REST if each not in QUICK)],
)
def test_a_collective_whose_peer_was_killed_is_no_failure_of_its_own(tmp_path, where, name):
    ranks = [processes().Process(target=bereaved, args=(rank, str(tmp_path), where, name)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(patience(100))
        assert not process.is_alive(), "a rank hangs"
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["peer_lost"] * 2
