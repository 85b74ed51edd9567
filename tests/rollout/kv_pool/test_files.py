"""Files of the KV pool: what a rank parks is what any rank finds, to the bit, or it is not found at all."""

from __future__ import annotations

import logging
import os
import resource
import signal
import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from distqueue.payload.sweep import memory, sweep
from fusion.inference.pooled import KVDamaged, KVKey
from fusion.rollout.kv_pool.files import KVFiles
from fusion.rollout.kv_pool.pool import KVPoolSpec

KEY = KVKey("tp 0/1", "g1/0", 3, "ab" * 16, 40)
ROUTING = torch.arange(39 * 2 * 2, dtype=torch.int16).view(39, 2, 2)


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        yield Path(folder)


def opened(root, rank=0, run="run", **limits):
    return KVFiles(KVPoolSpec(run, **limits), rank, root)


def kv(seed=0, nbytes=4096):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def park(files, key=KEY, content=None, routing=None, charged_bytes=None):
    content = kv() if content is None else content
    return files.park(
        key, computed=key.num_tokens - 1, kv=content, routing=routing, charged_bytes=charged_bytes or content.numel()
    )


def read(files, key=KEY, routing=None):
    """What a reader gets; None: it finds nothing."""
    found = files.find(key)
    if found is None:
        return None
    content = torch.empty(found.kv_bytes, dtype=torch.uint8)
    buffer = torch.empty(0, dtype=torch.uint8) if routing is None else torch.empty_like(routing)
    try:
        found.read(content, buffer.view(-1).view(torch.uint8))
    finally:
        found.close()
    return content, buffer


def paths(root):
    return sorted(path for path in root.rglob("*") if path.is_file() and path.parent.name == "files")


def test_any_rank_of_the_run_reads_what_one_has_parked(root):
    one, other = opened(root, 0), opened(root, 1)
    assert park(one, routing=ROUTING)
    content, routing = read(other, routing=ROUTING)
    assert torch.equal(content, kv()) and torch.equal(routing, ROUTING)
    (path,) = paths(root)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o077 == 0
    assert (one.computed("g1/0"), other.computed("g1/0"), one.nbytes, other.nbytes) == (39, 0, 4096, 0)
    found = other.find(KEY)
    found.close()
    assert (found.computed, found.routing, found.own) == (39, (39, 2, 2, 2), False)
    other.discard(KEY)
    assert read(one) is None and not paths(root)
    one.forget(["g1/0"])
    assert one.nbytes == 0


OTHER = [
    replace(KEY, shard="tp 1/2"),
    replace(KEY, request="g1/1"),
    replace(KEY, version=4),
    replace(KEY, prefix="cd" * 16),
    replace(KEY, num_tokens=41),
]


@pytest.mark.parametrize("other", OTHER, ids=["shard", "request", "version", "tokens", "length"])
def test_kv_of_anything_else_is_not_found_and_not_served_under_its_name(root, other):
    one = opened(root)
    assert park(one)
    assert read(one, other) is None
    (path,) = paths(root)
    path.rename(path.with_name(one._file_names.file(other)))
    with pytest.raises(KVDamaged, match="another"):
        read(one, other)


def test_kv_of_another_run_or_host_is_not_found(root):
    one = opened(root)
    assert park(one)
    assert read(opened(root, run="again")) is None
    elsewhere = opened(root, 1)
    elsewhere._file_names = replace(elsewhere._file_names, boot="0")
    assert read(elsewhere) is None


@pytest.fixture(scope="module")
def written():
    """One file, with its content and its reader."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        files = opened(Path(folder))
        assert park(files, routing=ROUTING)
        (path,) = paths(Path(folder))
        yield files, path, path.read_bytes()


@settings(max_examples=200)
@given(st.data())
def test_no_flipped_bit_is_served(written, data):
    files, path, content = written
    flipped = bytearray(content)
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)
    with pytest.raises(KVDamaged):
        read(files, routing=ROUTING)
    path.write_bytes(content)
    assert torch.equal(read(files, routing=ROUTING)[0], kv())


@settings(max_examples=50)
@given(st.data())
def test_no_file_of_another_length_is_served(written, data):
    files, path, content = written
    length = data.draw(st.integers(0, len(content) + 99).filter(lambda length: length != len(content)))
    path.write_bytes(content[:length].ljust(length, b"\0"))
    with pytest.raises(KVDamaged):
        read(files, routing=ROUTING)
    path.write_bytes(content)


def test_a_file_of_another_user_or_that_others_may_write_or_a_link_is_not_read(root):
    one = opened(root)
    park(one)
    (path,) = paths(root)
    path.chmod(0o620)
    with pytest.raises(KVDamaged, match="mode -rw--w----"):
        one.find(KEY)
    path.chmod(0o600)
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(KVDamaged, match="belongs to user 12345"):
            one.find(KEY)
    target = path.rename(root / "elsewhere")
    path.symlink_to(target)
    with pytest.raises(KVDamaged):
        one.find(KEY)


def test_a_file_that_ends_while_it_is_read_is_damaged(root):
    one = opened(root)
    park(one)
    found = one.find(KEY)
    (path,) = paths(root)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(KVDamaged, match="1 bytes early"):
        found.read(torch.empty(found.kv_bytes, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))
    found.close()


def keys(count):
    return [replace(KEY, request=f"r{number}") for number in range(count)]


def test_beyond_the_limit_the_oldest_is_on_disk_and_is_read_from_there(root):
    spill = root / "disk"
    one = opened(root, max_memory_bytes=3 * 4096, spill=str(spill), max_disk_bytes=2 * 4096)
    other = opened(root, 1, spill=str(spill))
    for number, key in enumerate(keys(6)):
        assert park(one, key, kv(number))
    assert one.evictions == 1 and one.nbytes == 3 * 4096
    assert len(paths(spill)) == 2 and len(paths(root)) == 5
    for number, key in enumerate(keys(6)):
        found = read(other, key)
        assert found is None if number == 0 else torch.equal(found[0], kv(number))
    one.close(), other.close()
    assert not [*spill.iterdir()]


def test_what_another_engine_has_taken_is_not_moved_to_disk(root):
    one = opened(root, max_memory_bytes=2 * 4096, spill=str(root / "disk"))
    for key in keys(2):
        park(one, key)
    one.discard(keys(1)[0])
    assert park(one, keys(3)[2]) and one.evictions == 0 and not paths(root / "disk")
    assert one.computed("r0") == 0 and read(one, keys(2)[1])


@pytest.mark.parametrize("cause", ["taken", "full"])
def test_what_cannot_be_moved_to_disk_where_it_would_make_room_for_others_is_lost_once(root, cause):
    limits = {"max_memory_bytes": 2 * 4096, "max_disk_bytes": 4096}
    one = opened(root, spill=str(root / "disk"), **limits)
    first, second, third = keys(3)
    assert park(one, first) and park(one, second)
    if cause == "taken":
        one.discard(first)
    with file_size_limit(2048) if cause == "full" else nullcontext():
        parked = park(one, third, kv(2, 2 * 4096))  # the first is to go to disk, and from there out for the second
    assert parked == (cause == "taken") and one.computed(first.request) == 0
    one.forget([first.request, second.request, third.request])
    assert one.nbytes == 0 and not paths(root) and not paths(root / "disk")


@contextmanager
def file_size_limit(nbytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_space_nothing_is_parked_nothing_is_left_and_it_is_said_once(root, caplog):
    one = opened(root)
    with caplog.at_level(logging.WARNING), file_size_limit(2048):
        assert not park(one) and not park(one, keys(1)[0])
    assert one.evictions == 2 and one.nbytes == 0 and one.computed("g1/0") == 0
    assert not [path for path in root.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    (record,) = caplog.records
    assert "no space for 4,096 bytes of KV" in record.message and "rollout.kv_pool.spill" in record.message
    one.clear()
    assert park(one) and read(one), "when the files of older weights are gone, there may be space again"


def test_half_of_shared_memory_is_left_to_the_queue(root):
    about = os.statvfs(root)
    (one,) = opened(root)._folders.values()
    one._check_free(0)
    with pytest.raises(OSError, match="leave less than 50% of its space free"):
        one._check_free((about.f_bavail - about.f_blocks // 2 + 1) * about.f_frsize)


def test_a_file_that_was_read_is_written_into_again(root):
    one, other = opened(root, 0), opened(root, 1)
    sizes = [4096, 9000, 100, 9000]
    for number, (key, nbytes) in enumerate(zip(keys(4), sizes, strict=True)):
        writer, reader = (one, other) if number % 2 else (other, one)
        park(writer, key, kv(number, nbytes), charged_bytes=nbytes)
        inodes = {path.stat().st_ino for path in root.rglob("*") if path.is_file()}
        assert torch.equal(read(reader, key)[0], kv(number, nbytes))
        reader.discard(key)
        assert {path.stat().st_ino for path in root.rglob("*") if path.is_file()} == inodes, "its memory is kept"
    assert len(inodes) == 1 + 2, "one file, and two locks"
    (path,) = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    assert path.stat().st_mode & 0o777 == 0o600
    small = opened(root, 2, max_memory_bytes=10 * 4096)
    for key in keys(3):
        park(small, key)
        small.discard(key)
    assert len([*root.glob("*/rank-2/*")]) == 1, "an eighth of the limit"


def test_the_last_rank_that_closes_leaves_nothing(root):
    one, other = opened(root, 0), opened(root, 1)
    park(one), park(other, keys(1)[0])
    one.close()
    assert read(other, KEY) is None and read(other, keys(1)[0]), "each removes its own"
    other.close()
    assert not [*root.iterdir()]


def park_and_die(root, run):
    """Another process: a rank that parks KV and is killed."""
    if pid := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        return
    try:
        park(opened(root, 7, run))
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("spills", [False, True])
def test_a_process_that_replaces_a_killed_one_removes_what_that_has_written_and_nothing_else(root, spills):
    limits = dict(max_memory_bytes=1, spill=str(root / "disk"), max_disk_bytes=9 * 4096) if spills else {}
    others, own, gone = keys(3)
    alive = opened(root, 0, **limits)
    park(alive, others)
    if pid := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    else:
        try:
            dead = opened(root, 1, **limits)
            park(dead, own), park(dead, gone)
            dead.forget([gone.request])
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert len([*root.rglob("files/*")]) == 2
    replacement = opened(root, 1, **limits)
    assert len([*root.rglob("files/*")]) == 1 and read(alive, others) is not None
    assert read(replacement, own) is None
    replacement.close(), alive.close()
    assert not [path for path in root.rglob("*") if path.is_file()]


def test_what_killed_ranks_have_left_is_removed_once_all_of_them_are_dead(root):
    one = opened(root, 0)
    park(one, keys(1)[0])
    for _ in range(2):
        park_and_die(root, "run")
        sweep(root)
        assert len(paths(root)) == 2, "a rank lives"
    os.close(one._folders["memory"]._lock)
    sweep(root)
    assert len(paths(root)) == 2, "its lock is free, but the process that it names lives"
    park_and_die(root, "alone")
    assert len(paths(root)) == 3
    opened(root, run="next").close()
    assert len(paths(root)) == 2 and not list(root.glob("*alone*")), "by whoever comes next"
