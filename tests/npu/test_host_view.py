import pytest
import torch

from fusion.npu import open_device


@pytest.fixture
def card():
    """A card that no other test opens, as this process may hold tensors of others on the first one."""
    yield open_device("emulated", index=15, capacity_bytes=64 << 20)
    torch.npu.set_device(0)


@pytest.fixture(params=["emulated", "ledger"])
def device(request):
    if request.param == "emulated":
        yield request.getfixturevalue("card")
        return
    from fusion.npu.ledger import LedgerDevice

    ledger = LedgerDevice(0, 64 << 20)
    yield ledger
    ledger.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_view_is_on_the_host_over_the_same_bytes(device, dtype):
    flat = torch.zeros(24, dtype=dtype, device=device.torch_device)
    part = flat[4:20].view(4, 4).t()
    view = device.host_view(part)
    assert view.device.type == "cpu" and view.shape == part.shape and view.stride() == part.stride()
    view[1, 2] = 5
    assert part[1, 2] == 5 and flat.sum() == 5
    flat.fill_(3)
    device.synchronize()
    assert view.eq(3).all()
    allocated = device.memory().allocated
    again = device.host_view(flat)
    assert device.memory().allocated == allocated and again.numel() == 24


def test_a_view_keeps_the_memory_of_its_tensor(card):
    before = card.memory().allocated
    view = card.host_view(torch.full((1000,), 2.0, device=card.torch_device))
    others = [torch.full((1000,), 9.0, device=card.torch_device) for _ in range(8)]
    assert view.eq(2).all()
    del view, others
    assert card.memory().allocated == before


def test_a_released_storage_has_no_view(card):
    flat = torch.zeros(24, device=card.torch_device)
    flat.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="released"):
        card.host_view(flat)
    flat.untyped_storage().resize_(96)
    card.host_view(flat).fill_(4)
    assert flat.eq(4).all()
