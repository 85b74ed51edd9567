"""Trips of optimizer state, with memory in the figures of the card's allocator."""

from __future__ import annotations

import gc

import pytest
import torch

from fusion.offload import HostPool, Offloader
from fusion.offload.pool import ALIGN
from tests.offload.memory import free_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def some_tensor(device, dtype=torch.float32, numel=10_000, seed=0, owner="optimizer") -> torch.Tensor:
    bits = torch.randint(-(2**62), 2**62, (numel,), generator=torch.Generator().manual_seed(seed))
    with device.owner(owner):
        return bits.view(dtype)[:numel].clone().to(device.torch_device)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().flatten().contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_round_trips_keep_every_bit_and_take_host_memory_once(device, dtype):
    gc.collect()
    offloader = Offloader(device, HostPool(device), bucket_bytes=4096)
    tensor = some_tensor(device, dtype)
    view = tensor[100:200].view(10, 10)
    before, held = bits_of(tensor), set()
    for _ in range(10):
        resident, owned = device.memory().allocated, device.memory_by_owner()["optimizer"]
        offloader.out({"exp_avg": tensor})
        assert not offloader.resident("exp_avg")
        offloader.wait()
        assert offloader.host("exp_avg").numel() == tensor.nbytes
        assert tensor.untyped_storage().nbytes() == 0
        assert resident - device.memory().allocated >= tensor.nbytes, "the card really has the memory back"
        clutter = torch.full((tensor.nbytes,), 7, dtype=torch.uint8, device=device.torch_device)
        del clutter
        offloader.back(["exp_avg"])
        offloader.wait(["exp_avg"])
        assert offloader.resident("exp_avg")
        assert device.memory().allocated == resident
        assert device.memory_by_owner()["optimizer"] == owned
        held.add(offloader.pool.nbytes)
    assert torch.equal(bits_of(tensor), before) and torch.equal(bits_of(view), bits_of(tensor[100:200]))
    assert len(held) == 1


def test_memory_is_freed_piece_by_piece_as_copies_are_done(device):
    """What was asked to leave first is off the card first, while later copies are under way."""
    offloader = Offloader(device, bucket_bytes=1 << 16)
    tensors = {f"state.{index}": some_tensor(device, numel=1 << 16, seed=index) for index in range(4)}
    before, resident = {name: bits_of(tensor) for name, tensor in tensors.items()}, device.memory().allocated
    offloader.out(tensors)
    offloader.wait(["state.1"])
    assert tensors["state.1"].untyped_storage().nbytes() == 0
    offloader.poll()
    assert device.memory().allocated <= resident - tensors["state.1"].nbytes
    offloader.wait()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors.values())
    offloader.back(["state.2"])
    offloader.wait(["state.2"])
    assert torch.equal(bits_of(tensors["state.2"]), before["state.2"])
    assert tensors["state.3"].untyped_storage().nbytes() == 0
    offloader.back()
    offloader.wait()
    assert all(torch.equal(bits_of(tensors[name]), before[name]) for name in tensors)


def test_copies_start_behind_the_work_that_was_queued_before_them(device):
    """`out` takes what the current stream is still computing; nothing computed after `wait` sees old content."""
    offloader = Offloader(device, bucket_bytes=4096)
    tensor = some_tensor(device)
    for step in range(3):
        tensor.fill_(step)
        offloader.out({"state": tensor})
        offloader.wait()
        offloader.back()
        offloader.wait()
        tensor.add_(1)
        assert bool((tensor.cpu() == step + 1).all())


def test_copies_out_wait_for_uploads_that_the_current_stream_has_queued(device):
    offloader, tensor = Offloader(device), some_tensor(device)
    for step in range(2):
        upload = device.host_empty(tensor.shape, tensor.dtype).fill_(step)
        tensor.copy_(upload, non_blocking=True)
        offloader.out({"state": tensor})
        offloader.wait()
        offloader.back()
        offloader.wait()
        assert bool((tensor.cpu() == step).all())


def test_memory_to_come_back_may_still_be_in_use_by_the_current_stream(device):
    """What was freed is taken by the next allocation, whose writes must come behind the reads that are queued."""
    offloader, tensor = Offloader(device), some_tensor(device, numel=1 << 14)
    before, download = bits_of(tensor), device.host_empty((1 << 14,), torch.float32)
    offloader.out({"state": tensor})
    offloader.wait()
    other = torch.full((1 << 14,), 7.0, device=device.torch_device)
    place = other.data_ptr()
    download.copy_(other, non_blocking=True)
    del other
    offloader.back()
    assert tensor.data_ptr() == place, "else this test shows nothing"
    offloader.poll()  # the copy in may run as soon as it can
    offloader.wait()
    assert torch.equal(bits_of(tensor), before)
    device.current_stream().synchronize()
    assert bool((download == 7).all())


def test_tensors_of_one_storage_travel_once_and_together(device):
    offloader = Offloader(device)
    flat = some_tensor(device)
    other = some_tensor(device, torch.int64, numel=64, seed=1)
    parameter = torch.nn.Parameter(flat[16:116].view(4, 25))
    before, others = bits_of(flat), bits_of(other)
    offloader.out({"parameter": parameter, "flat": flat, "other": other})
    offloader.wait()
    assert offloader.host("parameter") is offloader.host("flat") and offloader.host("flat").numel() == flat.nbytes
    taken = offloader.pool.nbytes - free_bytes(offloader.pool)
    assert taken == sum(nbytes + -nbytes % ALIGN for nbytes in (flat.nbytes, other.nbytes))
    offloader.back(["parameter"])
    offloader.wait(["flat"])
    assert offloader.resident("flat") and not offloader.resident("other")
    assert torch.equal(bits_of(flat), before)
    with torch.no_grad():
        parameter.zero_()
    assert not flat[16:116].any() and flat.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    offloader.back()
    offloader.wait()
    assert torch.equal(bits_of(other), others)
    device.synchronize()
    offloader.poll()
    assert free_bytes(offloader.pool) == offloader.pool.nbytes


def test_called_back_before_it_left_it_stays(device):
    offloader = Offloader(device)
    tensor = some_tensor(device)
    before, place = bits_of(tensor), tensor.data_ptr()
    offloader.out({"state": tensor})
    offloader.back(["state"])
    offloader.wait(["state"])
    tensor.view(torch.int32).add_(1)
    offloader.out({"state": tensor})
    offloader.wait()
    offloader.back()
    offloader.wait()
    tensor.view(torch.int32).sub_(1)
    assert torch.equal(bits_of(tensor), before) and place != 0


@pytest.mark.parametrize("spare", [False, True])
def test_out_again_without_a_wait_keeps_every_bit(device, spare):
    """The copy out waits for the copy in; the host region of the first trip is not the second's."""
    offloader = Offloader(device, bucket_bytes=4096)
    tensor = some_tensor(device, numel=1 << 14)
    if spare:  # else the second trip needs the first one's region, and waits for it
        offloader.pool.give(offloader.pool.take([4 * tensor.nbytes]))
    before = bits_of(tensor)
    for _ in range(3):
        offloader.out({"state": tensor})
        offloader.wait()
        offloader.back()
    offloader.wait()
    assert torch.equal(bits_of(tensor), before)


def test_host_regions_are_reused_only_after_they_were_read(device):
    """Two tensors that are never out together share the pool's memory, and neither reads the other's content."""
    offloader = Offloader(device)
    first, second = (some_tensor(device, numel=1 << 14, seed=seed) for seed in (1, 2))
    before = bits_of(first), bits_of(second)
    for _ in range(3):
        offloader.out({"first": first})
        offloader.wait()
        offloader.back()
        offloader.out({"second": second})
        offloader.wait()
        offloader.back()
    offloader.wait()
    assert offloader.pool.nbytes == first.nbytes
    assert torch.equal(bits_of(first), before[0]) and torch.equal(bits_of(second), before[1])


def test_trips_neither_stop_the_card_nor_empty_its_cache(device, monkeypatch):
    """What the allocator has reserved, and the pool has pinned, serves every later trip."""
    offloader = Offloader(device, bucket_bytes=1 << 20)
    tensors = {f"state.{index}": some_tensor(device, numel=300_001 + index, seed=index) for index in range(21)}

    def refuse() -> None:
        raise AssertionError("not on the way of a switch")

    monkeypatch.setattr(device, "synchronize", refuse)
    monkeypatch.setattr(device, "empty_cache", refuse)
    held = set()
    for _ in range(4):
        offloader.out(tensors)
        offloader.wait()
        offloader.back()
        offloader.wait()
        held.add((device.memory().reserved, offloader.pool.nbytes))
    assert len(held) == 1


def test_twice_out_and_twice_back_are_refused_by_name(device):
    offloader = Offloader(device)
    tensor, empty = some_tensor(device), torch.zeros(0, device=device.torch_device)
    alias = tensor[:5]
    offloader.out({"exp_avg": tensor, "empty": empty})
    assert offloader.resident("empty")
    with pytest.raises(AssertionError, match="exp_avg is out already"):
        offloader.out({"exp_avg": tensor})
    with pytest.raises(AssertionError, match="alias shares its storage with exp_avg, which is leaving"):
        offloader.out({"alias": alias})
    offloader.wait()
    with pytest.raises(AssertionError, match="alias holds no storage"):
        offloader.out({"alias": alias})
    offloader.back()
    with pytest.raises(AssertionError, match="exp_avg is not out"):
        offloader.back(["exp_avg"])
    offloader.wait()


def test_no_room_to_come_back_leaves_it_out_and_whole(device):
    offloader = Offloader(device)
    tensors = {f"state.{i}": some_tensor(device, numel=1 << 20, seed=i) for i in range(2)}
    before = {name: bits_of(tensor) for name, tensor in tensors.items()}
    offloader.out(tensors)
    offloader.wait()
    hog = torch.empty(device.memory().free - (6 << 20), dtype=torch.uint8, device=device.torch_device)
    left = device.memory().allocated
    with pytest.raises(torch.OutOfMemoryError):
        offloader.back()
    assert sum(offloader.host(name).numel() for name in tensors) == 8 << 20
    assert device.memory().allocated == left, "nothing was kept"
    assert not any(offloader.resident(name) for name in tensors)
    del hog
    offloader.back()
    offloader.wait()
    assert all(torch.equal(bits_of(tensors[name]), before[name]) for name in tensors)


def test_no_room_on_the_host_leaves_everything_resident(device):
    class FullPool(HostPool):
        def take(self, sizes):
            raise RuntimeError("no more memory to pin")

    offloader = Offloader(device, FullPool(device))
    tensor = some_tensor(device)
    with pytest.raises(RuntimeError, match="to pin"):
        offloader.out({"state": tensor})
    offloader.wait()
    assert offloader.resident("state") and tensor.untyped_storage().nbytes() == tensor.nbytes
