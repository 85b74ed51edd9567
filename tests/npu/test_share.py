"""Memory of a card that other processes see: the same bytes, charged once, and nothing left behind."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from multiprocessing.connection import Listener
from pathlib import Path

import pytest
import torch

from fusion.npu.ledger import LedgerDevice

MIB = 1 << 20

MATE = """
import gc, sys, torch
from multiprocessing.connection import Client
from fusion.npu import open_device
pipe = Client(sys.argv[1])
device = open_device("emulated", index=2)
blocks = []
while True:
    order, value = pipe.recv()
    if order == "map":
        blocks.append(device.map(value, [None])[0])
        blocks[-1].add_(1)
        pipe.send((blocks[-1][:4].tolist(), device.memory().allocated))
    elif order == "share":
        blocks.append(torch.full((value,), 7, dtype=torch.uint8, device=device.torch_device))
        pipe.send(device.share([blocks[-1]]))
"""


@pytest.fixture
def mate(tmp_path):
    """Another process, by its pipe; its card is another one. `.process` is the process."""
    with Listener(str(tmp_path / "pipe")) as listener:
        process = subprocess.Popen([sys.executable, "-c", MATE, listener.address])
        pipe = listener.accept()
        pipe.process = process
        yield pipe
        process.kill()
        process.wait()


def _ask(pipe, order, value):
    pipe.send((order, value))
    assert pipe.poll(60)
    return pipe.recv()


def _named_memory(pid):
    """Files under /dev/shm that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}


def _bytes(card, nbytes, value=0):
    return torch.full((nbytes,), value, dtype=torch.uint8, device=card.torch_device)


def test_memory_is_shared_both_ways_and_charged_to_its_owner(card, mate):
    before = _named_memory(os.getpid())
    with card.owner("buckets"):
        mine = _bytes(card, 3 * MIB, 4)
    assert _ask(mate, "map", card.share([mine])) == ([5] * 4, 0), "the mapper is not charged"
    assert card.memory_by_owner()["buckets"] == card.memory().allocated == 3 * MIB
    assert mine.eq(5).all()
    second = _bytes(card, MIB, 8)
    assert _ask(mate, "map", card.share([second]))[0] == [9] * 4
    assert mine[-1].item() == 5, "a block of its own"
    small = _bytes(card, 100, 1)
    assert _ask(mate, "map", card.share([small[50:]]))[0] == [2] * 4 and small.eq(2).all(), "the storage, not the view"

    handle = _ask(mate, "share", 2 * MIB)
    (theirs,) = card.map(handle, [None])
    assert (theirs.dtype, theirs.shape, theirs.device) == (torch.uint8, (2 * MIB,), card.torch_device)
    assert theirs.eq(7).all()
    assert card.memory().allocated == 4 * MIB + 512, "mapping costs the card nothing"
    view = theirs.view(torch.float32)[1:]
    named = _named_memory(os.getpid()) | _named_memory(mate.process.pid)
    assert named <= before, "what is shared has no name that could be left behind"
    mate.process.kill()
    mate.process.wait()
    assert view.view(torch.uint8).eq(7).all(), "who maps it keeps it, whatever happens to the owner"
    with pytest.raises(ValueError, match=f"process {mate.process.pid} that owned it has ended"):
        card.map(handle, [None])

    del mine, second, small
    assert card.memory().allocated == 0


def test_storage_that_went_and_came_back_is_found_at_its_new_place(card):
    flat = _bytes(card, MIB, 1)
    first = card.share([flat])
    flat.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="have bytes"):
        card.share([flat])
    between = _bytes(card, MIB)
    flat.untyped_storage().resize_(MIB)
    flat.fill_(3)
    assert card.share([flat]) != first == card.share([between])
    assert card.map(card.share([flat]), [None])[0].eq(3).all()


def test_a_mapped_tensor_moves_to_another_block_with_its_views(card):
    first, second, longer = _bytes(card, MIB, 1), _bytes(card, MIB, 2), _bytes(card, 2 * MIB)
    (mapped,) = card.map(card.share([first]), [None])
    view = mapped.view(torch.float32)[1:]
    card.map(card.share([second]), [view])
    assert view.view(torch.uint8).eq(2).all() and mapped.eq(2).all() and first.eq(1).all()
    for handle, target in ((card.share([longer]), mapped), (card.share([second]), first)):
        with pytest.raises(ValueError, match="a mapped tensor of as many bytes"):
            card.map(handle, [target])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offset": -4096}, "lies outside its file"),
        ({"offset": 1 << 62}, "lies outside its file"),
        ({"nbytes": -1}, "lies outside its file"),
        ({"nbytes": 1 << 62}, "lies outside its file"),
        ({"file_bytes": 1 << 50}, "another size|smaller than its handle"),
        ({"pid": -1}, "has ended"),
        ({"fd": 0}, "has ended"),
    ],
)
def test_a_handle_that_does_not_describe_a_block_is_refused(card, changes, words):
    fields = ("pid", "fd", "inode", "file_bytes", "offset", "nbytes")
    block = _bytes(card, MIB, 1)
    handle = dict(zip(fields, struct.unpack("<6q", card.share([block])), strict=True))
    with pytest.raises(ValueError, match=words):
        card.map(struct.pack("<6q", *(handle | changes).values()), [None])


def test_a_block_that_comes_again_costs_no_page_faults(card):
    import resource

    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    handles = set()
    for round_ in range(3):
        start = faults()
        block = _bytes(card, 16 * MIB, round_)
        handle = card.share([block])
        (mapped,) = card.map(handle, [None])
        assert mapped[-1].item() == round_
        mapped.zero_()
        handles.add(handle)
        del block, mapped
        if round_ > 0:
            assert faults() - start < 500, "of 4096 pages"
    assert len(handles) == 1


def test_what_cannot_be_shared_is_refused(card):
    with pytest.raises(ValueError, match="lie on a card and have bytes"):
        card.share([torch.zeros(3)])
    with pytest.raises(ValueError, match="lie on a card and have bytes"):
        card.share([_bytes(card, 0)])
    assert card.can_share
    ledger = LedgerDevice(0, 60 * MIB)
    try:
        assert not ledger.can_share
        with pytest.raises(RuntimeError, match="cannot be shared between processes"):
            ledger.share([torch.zeros(3)])
    finally:
        ledger.close()


def test_several_blocks_are_shared_and_mapped_at_once_in_their_order(card):
    blocks = [_bytes(card, 512 * (1 + number), number) for number in range(4)]
    (second,) = card.map(card.share(blocks[3:]), [None])
    handles = card.share([*blocks[:3], blocks[3]])
    mapped = card.map(handles, [None, None, None, second])
    assert mapped[3] is second and all(torch.equal(one, other) for one, other in zip(mapped, blocks, strict=True))
    with pytest.raises(ValueError, match="bytes of handles for 3 tensors"):
        card.map(handles, [None] * 3)
    with pytest.raises(ValueError, match="bytes of handles for 4 tensors"):
        card.map(handles[:-1], [None] * 4)
