"""What failures do to a switch: all ranks leave together and say which rank, round and parameter; nothing half-done
stays."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusion.ep_switch import SwitchError, plan_switch, transfer
from fusion.ep_switch.exchange_collective import CollectiveExchange
from fusion.ep_switch.exchange_shared import SharedExchange
from fusion.ep_switch.segment import PeerSegment
from fusion.model import Parallel
from tests.ep_switch.switching import BUCKET, End, assert_filled, build_pair, execute, own_bytes
from tests.families import family_config
from tests.helpers import processes, run_ranks, tiny_config
from tests.machine import patience, within
from tests.pairwise import thinned

MOE = tiny_config(num_key_value_heads=2)
LARGER = tiny_config(experts=False, num_hidden_layers=6, hidden_size=64, intermediate_size=128)
"""A megabyte, so that the allocator's pages are small beside it."""
EXCHANGES = ("shared", "collective")
DEVICES = ("emulated", "adversarial")


TAKES = {"shared": (PeerSegment, "read"), "collective": (PeerSegment, "unpack")}
SENDS = {"shared": (SharedExchange, "send"), "collective": (CollectiveExchange, "send")}


@contextmanager
def before(hook: tuple[type, str], at: int, act):
    """``act(self, *args)`` before the call number ``at`` of a method in this process."""
    (kind, method), calls = hook, [0]
    honest = getattr(kind, method)

    def hooked(self, *args):
        calls[0] += 1
        if calls[0] == at:
            act(self, *args)
        honest(self, *args)

    setattr(kind, method, hooked)
    try:
        yield
    finally:
        setattr(kind, method, honest)


def build(device, ranks=(0, 1)):
    ends = [End(Parallel(2, 1, 2), ranks).layout(MOE), End(Parallel(2, 2), ranks).layout(MOE)]
    return plan_switch(*ends, BUCKET), *build_pair(*ends, device)


def outcome(plan, rank, source, target, device, **options):
    """(message, bytes of the target that are left) of a switch that has to fail."""
    with pytest.raises(SwitchError) as caught:
        execute(plan, source, target, device=device, **options)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "errors travel to the controller"
    return str(caught.value), own_bytes(target, plan.shared_units(rank))


def flip(segment, wire=None):
    there = segment.pairs[1][0].view if wire is None else wire
    there.view(torch.int32)[(0,) * there.dim()] ^= 1


def corrupted(rank, device, exchange):
    """A bit changes on its way to rank 0, the second time something comes; and what comes after."""
    plan, source, target = build(device)
    with before(TAKES[exchange], 2 if rank == 0 else 0, flip):
        found = outcome(plan, rank, source, target, device, checksum=True, exchange=exchange)
    plan, source, target = build(device)
    execute(plan, source, target, device=device, checksum=True, exchange=exchange)
    assert_filled(target, via=torch.float32)
    return found


def lost(rank, device, exchange):
    """Nothing is copied on rank 0, the second time something comes."""
    plan, source, target = build(device)
    kind, method = TAKES[exchange]
    honest, calls = getattr(kind, method), [0]

    def hooked(self, *args):
        calls[0] += 1
        if calls[0] != 2:
            honest(self, *args)

    if rank == 0:
        setattr(kind, method, hooked)
    try:
        return outcome(plan, rank, source, target, device, checksum=True, exchange=exchange)
    finally:
        setattr(kind, method, honest)


@pytest.mark.parametrize(
    ("exchange", "device", "work"),
    thinned(list(product(EXCHANGES, DEVICES, (corrupted, lost))), lambda case: case, rest=pytest.mark.extended),
)
def test_a_corrupted_or_missing_transfer_is_found_and_named_on_all_ranks(exchange, device, work):
    one, other = run_ranks(work, 2, exchange, device=device)
    assert one == other
    message, held = one
    assert "rank 0 failed in round" in message and "at model." in message
    assert "from rank 1 arrived with another checksum" in message
    assert held == 0


def refused(rank, device, exchange):
    """First rank 1 has a target that is not empty, then it has another plan; then all is well."""
    plan, source, target = build(device)
    other_plan = plan_switch(plan.source, plan.target, BUCKET * (1 + rank))
    if rank == 1:
        target.weights.allocate()
    messages = []
    for attempt in (plan, other_plan):
        with pytest.raises(SwitchError) as caught:
            execute(attempt, source, target, device=device, exchange=exchange)
        messages.append(str(caught.value))
        assert_filled(source, via=torch.float32)
        target.weights.release()
    execute(plan, source, target, device=device, exchange=exchange)
    assert_filled(target, via=torch.float32)
    return messages


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_is_refused_is_refused_on_all_ranks_and_harms_nothing(exchange):
    results = run_ranks(refused, 2, exchange)
    assert results[0] == results[1]
    not_empty, other_plan = results[0]
    assert "rank 1 failed in preparation: " in not_empty and "release it before the switch" in not_empty
    assert other_plan.count("plans another switch") == 2


def boom(*_):
    raise ValueError("no such view")


def raising(rank, device, exchange):
    plan, source, target = build(device)
    with before(SENDS[exchange], 3 if rank == 1 else 0, boom):
        return outcome(plan, rank, source, target, device, checksum=True, exchange=exchange)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exception_on_one_rank_ends_the_switch_on_all(exchange, device):
    results = run_ranks(raising, 2, exchange, device=device)
    assert results[0] == results[1]
    message, held = results[0]
    assert "rank 1 failed in round" in message and "ValueError: no such view" in message and held == 0
    assert "checksum" not in message, "what a failed rank did not send is not held against it"


def out_of_memory(rank, device, exchange, checksum):
    """Rank 1 has room for the buffers and for a part of its target, which is twice its source."""
    ends = [End(Parallel(2, 2), (0, 1)).layout(LARGER), End(Parallel(2), (0, 1)).layout(LARGER)]
    plan, (source, target) = plan_switch(*ends, BUCKET), build_pair(*ends, device)
    module = torch.get_device_module(device.torch_device)
    device.empty_cache()
    room = sum(plan.wire_bytes(rank)) + (plan.target.nbytes(rank) - plan.source.nbytes(rank)) // 2
    if rank == 1:
        memory = device.memory()
        module.set_per_process_memory_fraction((memory.reserved + room) / memory.capacity, device.index)
    try:
        return outcome(plan, rank, source, target, device, checksum=checksum, exchange=exchange)
    finally:
        module.set_per_process_memory_fraction(1.0, device.index)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_out_of_memory_on_one_rank_ends_the_switch_on_all(exchange, checksum):
    results = run_ranks(out_of_memory, 2, exchange, checksum)
    assert results[0] == results[1]
    message, held = results[0]
    assert "rank 1 failed in round" in message and "OutOfMemoryError" in message and held == 0
    assert re.search(r" at (model\.)?(layers\.|embed)", message), message
    held = re.search(r"HBM by owner: weights ([\d.]+) MiB", message)
    assert held and float(held[1]) > 0.5, f"as it was when memory ran out: {message}"


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def mortal(rank: int, folder: str, late_s: float) -> None:
    """Two switches, each among three of four ranks, in each of which one is killed; the others begin ``late_s`` later,
    when what it shared is gone with it."""
    from fusion.npu import open_device

    torch.set_num_threads(1)
    device = open_device("emulated", index=rank)
    store = f"file://{folder}/store"
    dist.init_process_group(device.process_group_backend, init_method=store, rank=rank, world_size=4)
    told = {}
    for exchange, ranks, dies in (("shared", (0, 1, 2), 2), ("collective", (0, 1, 3), 3)):
        # every rank makes every group, though the second is used after a death: they are made first
        told[exchange] = dist.new_group(list(ranks)), ranks, dies
    pairs = {exchange: build_trio(device, ranks) for exchange, (_, ranks, _) in told.items()}
    dist.barrier()
    for exchange, (group, ranks, dies) in told.items():
        if rank not in ranks:
            continue
        plan, source, target = pairs[exchange]
        start = time.monotonic()
        at, act = (2, die) if rank == dies else (1, lambda *_: time.sleep(late_s))
        with before(SENDS[exchange], at, act):
            message, held = outcome(plan, rank, source, target, device, group=group, exchange=exchange)
        Path(folder, f"{exchange}{rank}").write_text(json.dumps([message, held, time.monotonic() - start]))
    os._exit(0)  # the default group is broken: leaving it in order would wait


def build_trio(device, ranks):
    ends = [End(Parallel(3), ranks), End(Parallel(3, 1, 1, 3), ranks)]
    config = tiny_config(num_hidden_layers=3, num_experts=6)
    layouts = [end.layout(config) for end in ends][::-1]
    return plan_switch(*layouts, BUCKET), *build_pair(*layouts, device)


@pytest.mark.parametrize("late_s", (0.0, pytest.param(2.0, marks=pytest.mark.extended)))
def test_the_end_of_a_process_is_noticed_and_named(tmp_path, late_s):
    ranks = [processes().Process(target=mortal, args=(rank, str(tmp_path), late_s)) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(patience(100))
        assert not process.is_alive(), "a rank hangs"
    for exchange, survivors, dead in (("shared", (0, 1), 2), ("collective", (0, 1), 3)):
        found = [json.loads((tmp_path / f"{exchange}{rank}").read_text()) for rank in survivors]
        for message, held, seconds in found:
            assert f"rank {dead} failed in round" in message and "its process has ended" in message, message
            assert " at model." in message and held == 0
            assert within(seconds, 20)
        if exchange == "shared":
            assert found[0][0] == found[1][0]


def mortal_at_the_broadcast(rank: int, folder: str, exchange) -> None:
    """A switch onto a card that only generates; one of the two that train is killed when its rounds are done."""
    from fusion.npu import open_device

    torch.set_num_threads(1)
    device = open_device("emulated", index=rank)
    store = f"file://{folder}/store"
    dist.init_process_group(device.process_group_backend, init_method=store, rank=rank, world_size=3)
    config = family_config("glm4_moe")
    layouts = [End(Parallel(2, pp=2), (0, 1)).layout(config), End(Parallel(), (2,)).layout(config)]
    plan, (source, target) = plan_switch(*layouts, BUCKET, keep=True), build_pair(*layouts, device)
    if rank == 1:
        transfer.Switcher._copy_card_values = die
    message, held = outcome(plan, rank, source, target, device, exchange=exchange)
    Path(folder, f"{rank}").write_text(json.dumps([message, held]))
    os._exit(0)  # the default group is broken: leaving it in order would wait


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_end_of_a_process_after_the_rounds_is_noticed_and_named(tmp_path, exchange):
    arguments = [(rank, str(tmp_path), exchange) for rank in range(3)]
    ranks = [processes().Process(target=mortal_at_the_broadcast, args=one) for one in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(patience(100))
        assert not process.is_alive(), "a rank hangs"
    for rank in (0, 2):
        message, held = json.loads((tmp_path / f"{rank}").read_text())
        assert "rank 1 " in message and "its process has ended" in message, message
        assert held == 0
