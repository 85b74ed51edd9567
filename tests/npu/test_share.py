"""Blocks that several processes see: the same bytes, charged once, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Listener

import pytest
import torch

from fusion.npu.ledger import LedgerDevice

MIB = 1 << 20

MATE = """
import gc, sys, torch
from multiprocessing.connection import Client
from fusion.npu import open_device
from fusion.npu.ledger import LedgerDevice
pipe = Client(sys.argv[1])
device = LedgerDevice(0, 60 << 20) if sys.argv[2] == "ledger" else open_device("emulated", index=2)
blocks = []
while True:
    order, value = pipe.recv()
    if order == "map":
        blocks.append(device.map(value))
        blocks[-1].tensor.add_(1)
        pipe.send((blocks[-1].tensor[:4].tolist(), device.memory().allocated))
    elif order == "share":
        blocks.append(device.share(value))
        blocks[-1].tensor.fill_(7)
        pipe.send(blocks[-1].handle)
"""


@pytest.fixture(params=["emulated", "ledger"])
def device(request):
    if request.param == "emulated":
        yield request.getfixturevalue("card")
        return
    ledger = LedgerDevice(0, 60 * MIB)
    yield ledger
    ledger.close()


@pytest.fixture
def mate(device, tmp_path):
    """Another process, by its pipe; its card is another one. `.process` is the process."""
    with Listener(str(tmp_path / "pipe")) as listener:
        process = subprocess.Popen([sys.executable, "-c", MATE, listener.address, device.kind])
        pipe = listener.accept()
        pipe.process = process
        yield pipe
        process.kill()
        process.wait()


def _ask(pipe, order, value):
    pipe.send((order, value))
    assert pipe.poll(60)
    return pipe.recv()


def test_blocks_are_shared_both_ways_and_charged_to_their_owner(device, mate):
    before = set(os.listdir("/dev/shm"))
    with device.owner("buckets"):
        mine = device.share(3 * MIB)
    assert (mine.tensor.dtype, mine.tensor.shape, mine.tensor.device) == (torch.uint8, (3 * MIB,), device.torch_device)
    assert device.memory_by_owner()["buckets"] == device.memory().allocated == 3 * MIB
    mine.tensor.fill_(4)
    assert _ask(mate, "map", mine.handle) == ([5] * 4, 0), "the mapper is not charged"
    assert mine.tensor.eq(5).all()
    second = device.share(MIB)
    second.tensor.fill_(8)
    assert _ask(mate, "map", second.handle)[0] == [9] * 4
    assert mine.tensor[-1].item() == 5, "a block of its own"

    theirs = device.map(_ask(mate, "share", 2 * MIB))
    assert theirs.tensor.eq(7).all() and theirs.tensor.device == device.torch_device
    assert device.memory().allocated == 4 * MIB, "mapping costs the card nothing"
    view = theirs.tensor.view(torch.float32)[1:]
    mate.process.kill()
    mate.process.wait()
    assert view.view(torch.uint8).eq(7).all(), "who maps it keeps it, whatever happens to the owner"
    with pytest.raises(ValueError, match=f"process {mate.process.pid} that owned it is gone"):
        device.map(theirs.handle)

    del mine, second
    assert device.memory().allocated == 0
    assert set(os.listdir("/dev/shm")) <= before


def test_a_block_that_comes_again_costs_no_page_faults(card):
    import resource

    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    handles = set()
    for round_ in range(3):
        start = faults()
        block = card.share(16 * MIB)
        block.tensor.fill_(round_)
        mapped = card.map(block.handle).tensor
        assert mapped[-1].item() == round_
        mapped.zero_()
        handles.add(block.handle)
        del block, mapped
        if round_ > 0:
            assert faults() - start < 500, "of 4096 pages"
    assert len(handles) == 1


def test_bad_sizes_and_capacity(device):
    with pytest.raises(ValueError, match="a shared block of 0 bytes"):
        device.share(0)
    with pytest.raises(torch.OutOfMemoryError):
        device.share(65 * MIB)
    assert device.memory().allocated == 0
    assert device.share(60 * MIB).tensor.numel() == 60 * MIB
