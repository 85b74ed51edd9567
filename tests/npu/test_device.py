"""The Device face: which card is chosen, what is refused, and the same account of memory on every kind."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fusion.npu import OWNERS, DeviceConfig, open_device
from fusion.npu.emulator import BuildError
from fusion.npu.ledger import LedgerDevice
from fusion.npu.owners import NewStorages, StorageOwners

KIB = 1 << 10


def test_importing_the_package_builds_nothing_and_renames_nothing(tmp_path):
    code = "import fusion.npu, torch; print(torch._C._get_privateuse1_backend_name())"
    run = subprocess.run(
        [sys.executable, "-c", code], env={"XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert run.stdout == "privateuseone\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["gpu", "NPU", "ledger", ""])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(ValueError, match=f"device.kind={kind!r}: expected one of auto, npu, cuda, emulated"):
        open_device(kind)
    with pytest.raises(ValueError, match="device.kind="):
        DeviceConfig(kind=kind).validate()


def test_bad_arguments_are_refused():
    DeviceConfig().validate()
    with pytest.raises(
        ValueError, match=r"device.capacity_bytes=0: expected a whole number in \[1, 1125899906842624\]"
    ):
        DeviceConfig(capacity_bytes=0).validate()
    with pytest.raises(ValueError, match="device.capacity_bytes=-1"):
        open_device("emulated", capacity_bytes=-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card")
def test_a_card_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device.kind=cuda: this machine or this build of torch has no CUDA card"):
        open_device("cuda")
    with pytest.raises(
        ValueError, match="device.kind=npu: torch_npu .*; Ascend cards need CANN .*; try device.kind=emulated"
    ):
        open_device("npu")


def test_the_emulated_card(card):
    assert (card.kind, card.index, card.torch_device) == ("emulated", 9, torch.device("npu", 9))
    assert card.process_group_backend == "cpu:gloo,npu:hccl"
    assert "npu:9" in card.describe() and "emulated" in card.describe()
    memory = card.memory()
    assert (memory.allocated, memory.capacity, memory.free) == (0, 60 << 20, 60 << 20)
    with pytest.raises(ValueError, match="device index 16: this machine has 16 npu cards"):
        open_device("emulated", index=16)


@pytest.fixture
def ledger():
    device = LedgerDevice(0, 400 * KIB)
    yield device
    device.close()


def test_where_the_emulated_npu_cannot_be_built_the_reason_is_stated(monkeypatch):
    def install():
        raise BuildError("/cache cannot be written")

    monkeypatch.setattr("fusion.npu.emulator.install", install)
    with pytest.warns(
        UserWarning, match="not available: /cache cannot be written. Counting plain CPU tensors instead.$"
    ):
        device = open_device("emulated")
    try:
        assert device.describe().startswith("CPU tensors counted by a ledger (no emulated NPU: logs say why), ")
    finally:
        device.close()


def test_the_ledger_counts_capacity_owners_and_resizes(ledger):
    with ledger.owner("weights"):
        weights = torch.zeros(100, 256)
    view = weights[3:].t()
    assert ledger.memory().allocated == 100 * KIB
    with pytest.raises(torch.OutOfMemoryError, match="out of memory: 409600 bytes requested.*weights 102400"):
        torch.zeros(400, 256)
    with ledger.owner("kv"):
        more = weights + 1
    expected = dict.fromkeys(OWNERS, 0) | {"weights": 100 * KIB, "kv": 100 * KIB}
    assert ledger.memory_by_owner() == expected
    more.untyped_storage().resize_(0)
    assert ledger.memory_by_owner() == expected | {"kv": 0}
    more.untyped_storage().resize_(50 * KIB)
    assert ledger.memory_by_owner()["kv"] == 50 * KIB
    ledger.host_empty((1000, 256), torch.float32)
    assert ledger.memory().allocated == 150 * KIB
    del weights
    assert ledger.memory().allocated == 150 * KIB, "the view holds it"
    del view, more
    memory = ledger.memory()
    assert (memory.allocated, memory.peak_allocated, memory.free) == (0, 200 * KIB, 400 * KIB)
    ledger.reset_peak()
    assert ledger.memory().peak_allocated == 0


def test_the_ledger_trains_and_has_streams_and_events(ledger):
    layer = torch.nn.Linear(64, 64)
    layer(torch.ones(2, 64)).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    start, end = ledger.event(timing=True), ledger.event(timing=True)
    with ledger.on_stream(ledger.new_stream()) as stream:
        start.record(stream)
        end.record(stream)
    ledger.current_stream().wait_event(end)
    assert start.elapsed_time(end) >= 0 and end.query()
    ledger.synchronize()
    assert ledger.torch_device.type == "cpu" and ledger.process_group_backend == "gloo"


def test_owners_by_weak_references_follow_the_storages():
    """What real cards use, tried on the CPU."""
    owners, cpu = StorageOwners(), torch.device("cpu")
    with NewStorages(cpu, lambda storage: owners.assign(storage, "weights")):
        weights = torch.zeros(256)
        with NewStorages(cpu, lambda storage: owners.assign(storage, "kv")):
            kv = torch.ones(512)
        view = weights[2:]
        view.add_(1)
    outside = weights + 1
    assert owners.bytes_by_owner() == {"weights": KIB, "kv": 2 * KIB}
    owners.assign(outside.untyped_storage(), "buckets")
    weights.untyped_storage().resize_(2 * KIB)
    assert owners.bytes_by_owner() == {"weights": 2 * KIB, "kv": 2 * KIB, "buckets": KIB}
    del weights, kv
    assert owners.bytes_by_owner() == {"weights": 2 * KIB, "buckets": KIB}, "the view holds it"
    del view
    assert owners.bytes_by_owner() == {"buckets": KIB}


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_real_card_adds_in_one_order_only_if_asked_to(deterministic, monkeypatch):
    """Whether vendors' operators do so then, only a card can tell."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("fusion.npu.accelerator.RealDevice", lambda kind, *_, **__: SimpleNamespace(kind=kind))
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        open_device("cuda", operators="plain", deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.is_deterministic_algorithms_warn_only_enabled() == deterministic
        open_device("emulated", deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize(
    "kind", [pytest.param("npu", marks=pytest.mark.npu), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_real_card(kind):
    device = open_device(kind)
    with device.owner("weights"):
        weights = torch.zeros(1 << 20, device=device.torch_device)
    owners, memory = device.memory_by_owner(), device.memory()
    assert owners["weights"] == 4 << 20 and sum(owners.values()) == memory.allocated <= memory.reserved
    weights.untyped_storage().resize_(0)
    assert device.memory_by_owner()["weights"] == 0
    stream, event = device.new_stream(), device.event(timing=True)
    with device.on_stream(stream):
        host = device.host_empty((1 << 10,), torch.float32)
        copy = host.fill_(3).to(device.torch_device, non_blocking=True)
        event.record()
    device.current_stream().wait_stream(stream)
    event.synchronize()
    assert host.is_pinned() and copy.sum().item() == 3 << 10
