"""Round trips of optimizer state, with memory in the figures of the emulated card's allocator."""

from __future__ import annotations

import gc

import pytest
import torch

from fusion.npu import open_device
from fusion.offload import HostPool, Offloader

DTYPES = [torch.float32, torch.bfloat16, torch.int64]


@pytest.fixture(scope="module")
def device():
    return open_device("emulated")


def some_tensor(device, dtype, numel=10_000, seed=0) -> torch.Tensor:
    bits = torch.randint(-(2**62), 2**62, (numel,), generator=torch.Generator().manual_seed(seed))
    with device.owner("optimizer"):
        return bits.view(dtype)[:numel].clone().to(device.torch_device)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().flatten().contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_round_trips_keep_every_bit_and_one_buffer(device, dtype):
    gc.collect()
    offloader = Offloader(device, HostPool(device))
    tensor = some_tensor(device, dtype)
    view = tensor[100:200].view(10, 10)
    before, addresses = bits_of(tensor), set()
    for _ in range(10):
        resident, owned = device.memory().allocated, device.memory_by_owner()["optimizer"]
        offloader.out({"exp_avg": tensor})
        assert not offloader.resident("exp_avg") and offloader.host_bytes == tensor.nbytes
        assert tensor.untyped_storage().nbytes() == 0
        assert resident - device.memory().allocated >= tensor.nbytes, "the card really has the memory back"
        addresses.add(offloader.pool.buffer("exp_avg", tensor.nbytes).data_ptr())
        clutter = torch.full((tensor.nbytes,), 7, dtype=torch.uint8, device=device.torch_device)
        del clutter
        offloader.back(["exp_avg"])
        assert offloader.resident("exp_avg") and offloader.host_bytes == 0
        assert device.memory().allocated == resident
        assert device.memory_by_owner()["optimizer"] == owned
    assert torch.equal(bits_of(tensor), before) and torch.equal(bits_of(view), bits_of(tensor[100:200]))
    assert len(addresses) == 1 and offloader.pool.nbytes == tensor.nbytes


def test_tensors_of_one_storage_travel_once_and_together(device):
    offloader = Offloader(device)
    flat = some_tensor(device, torch.float32)
    other = some_tensor(device, torch.int64, numel=64, seed=1)
    parameter = torch.nn.Parameter(flat[16:116].view(4, 25))
    before, others = bits_of(flat), bits_of(other)
    offloader.out({"parameter": parameter, "flat": flat, "other": other})
    assert offloader.host_bytes == offloader.pool.nbytes == flat.nbytes + other.nbytes
    offloader.back(["parameter"], owner="weights")
    assert offloader.resident("flat") and not offloader.resident("other")
    assert torch.equal(bits_of(flat), before)
    with torch.no_grad():
        parameter.zero_()
    assert not flat[16:116].any() and flat.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    offloader.back()
    assert torch.equal(bits_of(other), others) and offloader.host_bytes == 0


def test_what_was_written_in_between_is_what_comes_back(device):
    """The pool is overwritten by each trip: no stale content."""
    offloader = Offloader(device)
    tensor = some_tensor(device, torch.float32, seed=2)
    for step in range(3):
        tensor.fill_(step)
        offloader.out({"state": tensor})
        offloader.back()
        assert bool((tensor.cpu() == step).all())


def test_twice_out_and_twice_back_are_refused_by_name(device):
    offloader = Offloader(device)
    tensor, empty = some_tensor(device, torch.float32), torch.zeros(0, device=device.torch_device)
    alias = tensor[:5]
    offloader.out({"exp_avg": tensor, "empty": empty})
    assert offloader.resident("empty")
    with pytest.raises(AssertionError, match="exp_avg is out already"):
        offloader.out({"exp_avg": tensor})
    with pytest.raises(AssertionError, match="alias holds no storage"):
        offloader.out({"alias": alias})
    offloader.back()
    with pytest.raises(AssertionError, match="exp_avg is not out"):
        offloader.back(["exp_avg"])


def test_no_room_to_come_back_leaves_it_out_and_whole(device):
    offloader = Offloader(device)
    tensors = {f"state.{i}": some_tensor(device, torch.float32, numel=1 << 20, seed=i) for i in range(2)}
    before = {name: bits_of(tensor) for name, tensor in tensors.items()}
    offloader.out(tensors)
    hog = torch.empty(device.memory().free - (6 << 20), dtype=torch.uint8, device=device.torch_device)
    with pytest.raises(torch.OutOfMemoryError):
        offloader.back()
    assert offloader.host_bytes == 8 << 20
    del hog
    offloader.back()
    assert all(torch.equal(bits_of(tensors[name]), before[name]) for name in tensors)


def test_the_pool_only_grows(device):
    pool = HostPool(device)
    first = pool.buffer("a", 100).data_ptr()
    assert pool.buffer("a", 40).data_ptr() == first and pool.buffer("a", 40).numel() == 40 and pool.nbytes == 100
    pool.buffer("a", 200)
    pool.buffer("b", 50)
    assert pool.nbytes == 250
    assert pool.buffer("b", 50).device.type == "cpu"


def test_the_pool_is_not_memory_of_the_card(device):
    before = device.memory().allocated
    HostPool(device).buffer("a", 1 << 20)
    assert device.memory().allocated == before
