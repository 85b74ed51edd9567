"""What the emulated card says of its memory: bytes, owners, capacity, and cards shared by processes."""

from __future__ import annotations

import gc
import os
import threading
import uuid
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from fusion.npu import OWNERS, open_device
from fusion.npu.accelerator import session_file, sweep_sessions
from tests.helpers import processes

MIB = 1 << 20


def test_model_gradients_and_optimizer_are_what_one_computes_by_hand(card):
    hidden, width, layers = 128, 512, 4
    with card.owner("weights"):
        model = torch.nn.Sequential(
            *(
                torch.nn.Linear(*shape, device=card.torch_device)
                for shape in [(hidden, width), (width, hidden)] * layers
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with card.owner("gradients"):
        model(torch.randn(8, hidden, device=card.torch_device)).sum().backward()
    with card.owner("optimizer"):
        optimizer.step()
    gc.collect()
    parameter_bytes = layers * (2 * hidden * width + hidden + width) * 4
    owners = card.memory_by_owner()
    assert owners["weights"] == pytest.approx(parameter_bytes, rel=0.01)
    assert owners["gradients"] == pytest.approx(parameter_bytes, rel=0.01)
    assert owners["optimizer"] == pytest.approx(2 * parameter_bytes, rel=0.01)
    assert card.memory().allocated == pytest.approx(4 * parameter_bytes, rel=0.01)
    assert sum(owners.values()) == card.memory().allocated


def test_workspaces_count_at_the_peak(card):
    x = torch.ones(MIB, device=card.torch_device)
    card.reset_peak()
    x.sort()
    memory = card.memory()
    assert memory.allocated == 4 * MIB
    assert memory.peak_allocated >= 4 * MIB + 12 * MIB, "values, indices"
    card.reset_peak()
    assert card.memory().peak_allocated == 4 * MIB


def test_out_of_memory_names_owners_and_the_process_goes_on(card):
    with card.owner("weights"):
        weights = torch.zeros(10 * MIB, device=card.torch_device)
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.zeros(10 * MIB, device=card.torch_device)
    for part in (
        "npu:9",
        "40.00 MiB requested",
        "40.00 MiB allocated",
        "60.00 MiB",
        "0.00 KiB reserved but unused",
        "weights 40.00 MiB",
    ):
        assert part in str(error.value)
    assert card.memory().allocated == 40 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        weights + 1
    del weights
    assert torch.ones(10 * MIB, device=card.torch_device).sum().item() == 10 * MIB
    assert torch.npu.memory_stats(9)["num_ooms"] >= 2


def test_out_of_memory_inside_a_backward_pass(card):
    x = torch.ones(3 * MIB, device=card.torch_device, requires_grad=True)
    y = (x * x).sum()
    filler = torch.empty(36 * MIB, dtype=torch.uint8, device=card.torch_device)
    with pytest.raises(torch.OutOfMemoryError):
        y.backward()
    del filler
    (x * x).sum().backward()
    assert x.grad[0].item() == 2


def test_a_storage_goes_and_comes_back(card):
    with card.owner("buckets"):
        x = torch.arange(MIB, device=card.torch_device, dtype=torch.float32)
    view, storage = x[: MIB // 2], x.untyped_storage()
    storage.resize_(0)
    assert card.memory().allocated == 0 == card.memory_by_owner()["buckets"]
    storage.resize_(4 * MIB)
    assert card.memory_by_owner()["buckets"] == 4 * MIB == card.memory().allocated
    x.fill_(2)
    assert view.sum().item() == MIB
    storage.resize_(8 * MIB)
    assert card.memory().allocated == 8 * MIB
    assert view.sum().item() == MIB


def test_a_resized_out_keeps_its_owner(card):
    with card.owner("kv"):
        out = torch.empty(1, device=card.torch_device).resize_(0)
    torch.add(torch.ones(1000, device=card.torch_device), 1, out=out)
    assert card.memory_by_owner()["kv"] == 4096
    del out
    assert card.memory_by_owner()["kv"] == 0


def test_owners(card):
    with card.owner("weights"):
        weights = torch.zeros(1024, device=card.torch_device)
        with card.owner("kv"):
            kv = torch.zeros(2048, device=card.torch_device)
        more = weights + 1
    rest = torch.zeros(500, device=card.torch_device)
    expected = dict.fromkeys(OWNERS, 0) | {"weights": 8192, "kv": 8192, "activations": 2048}
    assert card.memory_by_owner() == expected
    card.assign([rest], "gradients")
    assert card.memory_by_owner() == expected | {"activations": 0, "gradients": 2048}
    freer = threading.Thread(target=lambda: kv.untyped_storage().resize_(0))
    freer.start()
    freer.join()
    assert card.memory_by_owner()["kv"] == 0, "freed from another thread: the right account"
    with pytest.raises(ValueError, match="'cache': expected one of weights, gradients"), card.owner("cache"):
        pass
    del more


def test_an_owner_does_not_tie_the_order_of_other_scopes(card):
    with card.owner("weights"):
        profiler = torch.profiler.profile()
        profiler.start()
    profiler.stop()


def test_host_tensors_are_not_memory_of_the_card(card):
    host = card.host_empty((3, 5), torch.bfloat16)
    assert host.is_pinned() and host.shape == (3, 5) and host.device.type == "cpu"
    assert not torch.empty(3).is_pinned() and torch.empty(3).pin_memory().is_pinned()
    card_copy = host.fill_(1).to(card.torch_device, non_blocking=True)
    assert (card.memory().requested, card.memory().allocated) == (30, 512)
    host.zero_().copy_(card_copy, non_blocking=True)
    assert host.sum().item() == 15


def test_limit_of_a_process(card):
    torch.npu.set_per_process_memory_fraction(0.25, 9)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(17 * MIB, dtype=torch.uint8, device=card.torch_device)
    torch.npu.set_per_process_memory_fraction(1.0, 9)
    torch.empty(17 * MIB, dtype=torch.uint8, device=card.torch_device)


def test_a_card_in_use_does_not_change_its_capacity(card):
    held = torch.empty(1, device=card.torch_device)
    with pytest.raises(ValueError, match="npu:9 is open in this process"):
        open_device("emulated", index=9, capacity_bytes=MIB)
    del held


class Neighbour:
    """Another process, which holds 15 MiB of card 3."""

    def __init__(self, session: str, capacity_bytes: int = 20 * MIB) -> None:
        self.pipe, there = processes().Pipe()
        self.process = processes().Process(target=_hold, args=(there, session, capacity_bytes), daemon=True)
        self.process.start()
        there.close()
        self.answer = self.pipe.recv()

    def free(self) -> str:
        self.pipe.send("free")
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _hold(pipe: Connection, session: str, capacity_bytes: int) -> None:
    try:
        device = open_device("emulated", index=3, capacity_bytes=capacity_bytes, session=session)
    except ValueError as error:
        pipe.send(str(error))
        return
    held = torch.empty(15 * MIB, dtype=torch.uint8, device=device.torch_device)
    pipe.send("holding")
    assert pipe.recv() == "free"
    del held
    device.empty_cache()
    pipe.send("freed")
    pipe.recv()


def test_two_processes_share_a_card(card):
    session = f"test-{uuid.uuid4().hex}"
    shared = open_device("emulated", index=3, capacity_bytes=20 * MIB, session=session)

    def take():
        return torch.empty(15 * MIB, dtype=torch.uint8, device=shared.torch_device)

    neighbour = Neighbour(session)
    assert neighbour.answer == "holding"
    assert shared.memory().free == 5 * MIB and shared.memory().allocated == 0
    with pytest.raises(torch.OutOfMemoryError, match="15.00 MiB by other processes"):
        take()
    assert neighbour.free() == "freed"
    mine = take()
    del mine
    shared.empty_cache()
    neighbour.kill()

    dying = Neighbour(session)
    with pytest.raises(torch.OutOfMemoryError):
        take()
    dying.kill()
    mine = take()
    assert shared.memory().free == 5 * MIB, "a dead process holds nothing"
    del mine
    assert shared.memory().free == 20 * MIB, "what is cached can be released"

    refused = Neighbour(session, capacity_bytes=32 * MIB)
    assert refused.answer.startswith("device.capacity_bytes=33554432: the processes already on this card")
    refused.process.join()
    open_device("emulated", index=3)
    assert not [name for name in os.listdir("/dev/shm") if session in name], "the last one out removes the account"


def test_the_account_of_a_session_whose_processes_were_killed_is_removed_by_the_next(card):
    killed, living = (f"test-{uuid.uuid4().hex}" for _ in range(2))
    neighbours = [Neighbour(session) for session in (killed, living)]
    accounts = {session: Path(session_file(session, 3)) for session in (killed, living)}
    assert all(account.stat().st_mode & 0o777 == 0o600 for account in accounts.values())
    neighbours[0].kill()
    assert accounts[killed].exists()
    mine = f"test-{uuid.uuid4().hex}"
    own = open_device("emulated", index=3, session=mine)
    open_device("emulated", index=4, session=f"test-{uuid.uuid4().hex}")
    assert not accounts[killed].exists() and accounts[living].exists()
    held = torch.empty(MIB, dtype=torch.uint8, device=own.torch_device)
    sweeper = processes().Process(target=sweep_sessions, args=("/x",))
    sweeper.start()
    sweeper.join()
    assert sweeper.exitcode == 0
    assert accounts[living].exists() and os.path.exists(session_file(mine, 3)), "processes hold them"
    del held
    neighbours[1].kill()
    open_device("emulated", index=3)
    open_device("emulated", index=4)
