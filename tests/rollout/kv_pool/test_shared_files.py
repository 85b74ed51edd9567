"""Files that any request may read: whole or not there, within the limits, gone with their version or their writer."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from distqueue.payload.sweep import memory
from fusion.rollout.kv_pool.folder import PoolFolder
from tests import machine
from tests.rollout.kv_pool.test_files import KEY, ROUTING, file_size_limit, keys, kv, opened, park, paths, read
from tests.rollout.kv_pool.test_pool import num_entries

PROMPTS = [replace(KEY, request="", version=number // 4, prefix=f"{number:032x}") for number in range(8)]


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        yield Path(folder)


def share(files, key, content):
    return files.writer.submit(park, files, key, content)


SHARE, PARK, FIND, FORGET, CLEAR = "share", "park", "find", "forget", "clear"
EVENTS = st.lists(
    st.tuples(st.sampled_from([SHARE, SHARE, FIND, PARK, PARK, FORGET, CLEAR]), *[st.integers(0, 7)] * 2), max_size=40
)


@settings(max_examples=100)
@given(st.none() | st.integers(1, 5), st.booleans(), EVENTS)
def test_shared_files_are_whole_or_not_there_and_within_the_limits(limit, spills, events):
    """Ranks share, park, find, forget and end versions in any order, while their writers write."""
    sizes = dict(zip(PROMPTS, (4096 * (1 + number % 3) for number in range(8)), strict=True))
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        root, limits = Path(folder), {} if limit is None else {"max_memory_bytes": limit * 4096}
        limits |= {"spill": str(root / "disk"), "max_disk_bytes": 3 * 4096} if spills else {}
        ranks = [opened(root, rank, **limits) for rank in range(2)]
        writing = [[], []]
        for event, which, number in events:
            files, key, mine = ranks[which % 2], PROMPTS[number], writing[which % 2]
            parked = keys(16)[number + 8 * (which % 2)]
            if event == SHARE:
                mine.append(share(files, key, kv(number, sizes[key])))
            elif event == FIND:
                content = read(files, key)
                assert content is None or torch.equal(content[0], kv(number, sizes[key]))
            elif event == PARK:
                park(files, parked, kv(number))
            elif event == FORGET:
                files.forget([parked.request])
            elif event == CLEAR:
                wait(one for one in mine if not one.cancel())
                files.clear()
            assert limit is None or files.nbytes <= limit * 4096
        for mine in writing:
            assert {one.result() for one in mine if not one.cancelled()} <= {True, False}
        planned = {name for files in ranks for name in files._names.values()}
        there = {path.name for path in root.rglob("files/*")}
        assert there <= planned, "none that nobody removes"
        assert all(num_entries(files._plan) == len(files._names) for files in ranks)
        for files in ranks:
            files.close()
        assert not [path for path in root.rglob("*") if path.is_file()]


def test_every_rank_reads_a_prompt_as_often_as_it_wants(root):
    one, other = opened(root, 0), opened(root, 1)
    assert PROMPTS[0] not in other
    assert one.writer.submit(park, one, PROMPTS[0], kv(), ROUTING).result()
    assert PROMPTS[0] in other and PROMPTS[1] not in other and other.nbytes == 0 < one.nbytes
    (path,) = paths(root)
    assert path.stat().st_mode & 0o777 == 0o600
    for files in (one, other, other):
        content, routing = read(files, PROMPTS[0], ROUTING)
        assert torch.equal(content, kv()) and torch.equal(routing, ROUTING)
    found, content = other.find(PROMPTS[0]), torch.empty(4096, dtype=torch.uint8)
    one.clear()
    assert not paths(root)
    found.read(content, torch.empty_like(ROUTING))
    found.close()
    assert torch.equal(content, kv()), "who has opened it reads it to the end"


def test_of_two_ranks_that_write_the_same_each_accounts_for_its_own(root):
    one, other = opened(root, 0), opened(root, 1)
    wait([share(files, PROMPTS[0], kv()) for files in (one, other)])
    assert len(paths(root)) == 1 and torch.equal(read(one, PROMPTS[0])[0], kv())
    one.clear()
    assert read(other, PROMPTS[0]) is None, "it is computed again"
    other.clear()
    assert one.nbytes == other.nbytes == 0 and not paths(root)


def test_a_prompt_whose_room_is_needed_while_it_is_written_leaves_no_file(root, monkeypatch):
    one, gate, begun = opened(root, max_memory_bytes=4096), threading.Event(), threading.Event()
    write = one._folders["memory"].write

    def slow(name, parts, fresh=False):
        if fresh:
            begun.set()
            gate.wait(60)
        write(name, parts, fresh)

    monkeypatch.setattr(one._folders["memory"], "write", slow)
    writing = share(one, PROMPTS[0], kv())
    assert begun.wait(60)
    assert park(one, KEY, kv(1)), "no write is waited for"
    gate.set()
    assert writing.result() is False
    assert PROMPTS[0] not in one and torch.equal(read(one, KEY)[0], kv(1)) and len(paths(root)) == 1


def test_without_space_a_prompt_is_not_shared(root, caplog):
    one = opened(root)
    with caplog.at_level(logging.WARNING), file_size_limit(2048):
        assert share(one, PROMPTS[0], kv()).result() is False
    assert one.evictions == 1 and one.nbytes == 0 and not paths(root) and len(caplog.records) == 1
    assert share(opened(root, 1, max_memory_bytes=100), PROMPTS[0], kv()).result() is False


def test_a_rank_that_closes_while_it_writes_leaves_nothing(root, monkeypatch):
    one, begun, write = opened(root), threading.Event(), PoolFolder.write

    def slow(folder, name, parts, fresh=False):
        begun.set()
        time.sleep(0.2)
        write(folder, name, parts, fresh)

    monkeypatch.setattr(PoolFolder, "write", slow)
    first, second = (share(one, key, kv()) for key in PROMPTS[:2])
    assert begun.wait(60)
    one.close()
    assert first.result() and second.cancelled() and not [*root.iterdir()]


@pytest.mark.parametrize("moment", range(4))
def test_a_rank_that_is_killed_leaves_whole_files_only(root, moment):
    one = opened(root, 0)
    contents = {key: kv(number, 8 << 20) for number, key in enumerate(PROMPTS)}
    pid = os.fork()
    if not pid:
        try:
            dead = opened(root, 1)
            for key, content in contents.items():
                share(dead, key, content)
            time.sleep(60)
        finally:
            os._exit(1)
    machine.wait_for(lambda: len(paths(root)) > moment, 20)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = [(read(one, key), content) for key, content in contents.items()]
    assert sum(content is not None for content, _ in found) == len(paths(root)) > moment
    assert all(content is None or torch.equal(content[0], expected) for content, expected in found)
    replacement = opened(root, 1)
    assert not paths(root)
    replacement.close(), one.close()
    assert not [*root.iterdir()]
