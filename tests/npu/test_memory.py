"""What the emulated card says of its memory: bytes, owners and capacity."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from fusion.npu import OWNERS, open_device

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
    freer = threading.Thread(target=lambda: kv.untyped_storage().resize_(0))
    freer.start()
    freer.join()
    assert card.memory_by_owner()["kv"] == 0, "freed from another thread: the right account"
    with pytest.raises(ValueError, match="'cache': expected one of weights, gradients"), card.owner("cache"):
        pass
    del more, rest


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
