"""What killed queues left in shared memory is removed by the next one that starts, and nothing else is."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distqueue.payload.shard import Shard
from distqueue.payload.sweep import ABANDONED_S, MARK, PREFIX, NodeProcess, decide, own, sweep
from tests.machine import running, wait_for

SHARD = """
import os, subprocess, sys
from distqueue.payload.shard import Shard
if os.fork():
    os.write(1, b"%d\\n" % os.getpid())
    os.wait()
    sys.stdin.read()  # the node process lives on
else:
    shard = Shard(sys.argv[1], None)
    (shard.folder / "segment").write_bytes(bytes(5000))
    os.write(1, b"%d\\n" % os.getpid())
    sys.stdin.read()
"""
"""A node process, and a shard's process that it has started"""


def left(root: Path) -> set[str]:
    return {folder.name.removeprefix(PREFIX) for folder in root.iterdir()}


def folder_of(root: Path, queue: str) -> Path:
    return root / f"{PREFIX}{queue}" / "s"


@pytest.fixture
def killed(tmp_path: Path):
    """Starts a shard's process of a queue, and kills it, and the process that would restart it."""
    started: list[subprocess.Popen] = []

    def start(queue: str, *, node_process_too: bool) -> None:
        command = [sys.executable, "-c", SHARD, str(folder_of(tmp_path, queue))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        pids = {int(process.stdout.readline()) for _ in range(2)}
        (shard,) = pids - {process.pid}
        assert (folder_of(tmp_path, queue) / "segment").exists()
        sweep(tmp_path, Path())
        assert queue in left(tmp_path), "it lives"
        if node_process_too:
            process.kill()
            process.wait()
        os.kill(shard, signal.SIGKILL)
        wait_for(lambda: not running(shard), 20)

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_next_start_of_a_queue_removes_at_once_what_a_killed_run_left(tmp_path: Path, killed) -> None:
    killed("dead", node_process_too=True)
    living = Shard(str(folder_of(tmp_path, "living")), None)
    assert left(tmp_path) == {"living"} and living.folder.exists()
    Shard(str(folder_of(tmp_path, "ours")), None)
    assert left(tmp_path) == {"living", "ours"}


def test_a_shard_that_may_be_restarted_keeps_its_folder_for_a_while(tmp_path: Path, killed) -> None:
    killed("returning", node_process_too=False)
    sweep(tmp_path, Path())
    mark = tmp_path / f"{PREFIX}returning" / MARK
    assert mark.exists(), "two starts of queues, far enough apart, remove it: neither needs to live in between"
    sweep(tmp_path, Path())
    assert left(tmp_path) == {"returning"}
    handle = own(folder_of(tmp_path, "returning"))
    assert (folder_of(tmp_path, "returning") / "segment").exists() and not mark.exists(), "it is back"
    os.close(handle)
    sweep(tmp_path, Path())
    os.utime(mark, (time.time() - ABANDONED_S, time.time() - ABANDONED_S))
    sweep(tmp_path, Path())
    assert not left(tmp_path)


def test_what_belongs_to_others_is_left_alone(tmp_path: Path) -> None:
    elsewhere = NodeProcess(host="another", boot="another", pid=1, started=1)
    for queue, owner in (("elsewhere", json.dumps(elsewhere)), ("starting", "")):
        folder_of(tmp_path, queue).mkdir(parents=True)
        folder_of(tmp_path, queue).with_name("s.lock").write_text(owner)
    (tmp_path / f"{PREFIX}empty").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "others")
    sweep(tmp_path, Path())
    assert {folder.name for folder in tmp_path.iterdir()} == {
        *(f"{PREFIX}{name}" for name in ("elsewhere", "starting", "empty", "link")),
        "others",
    }


@pytest.mark.parametrize(
    ("owners_dead", "free_s", "decision"),
    [
        ([True, True], None, "remove"),
        ([True, False], None, "mark"),
        ([True, False], ABANDONED_S - 1, "keep"),
        ([True, False], ABANDONED_S, "remove"),
        ([], None, "mark"),
        ([], ABANDONED_S, "remove"),
        ([None, True], None, "keep"),
        ([None], 1e9, "keep"),
    ],
)
def test_decisions(owners_dead: list[bool | None], free_s: float | None, decision: str) -> None:
    assert decide(owners_dead, free_s) == decision


def test_a_shard_that_starts_while_its_folder_is_removed_makes_it_anew(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "q")
    os.close(own(folder))
    lock = folder.with_name("s.lock")
    sweeper = os.open(lock, os.O_RDWR)
    fcntl.flock(sweeper, fcntl.LOCK_EX)
    process = subprocess.Popen([sys.executable, "-c", SHARD, str(folder)], stdin=subprocess.PIPE)
    waiting = f":{lock.stat().st_ino} "
    wait_for(lambda: any("->" in line and waiting in line for line in Path("/proc/locks").read_text().splitlines()), 20)
    lock.unlink()
    folder.rmdir()
    folder.parent.rmdir()
    os.close(sweeper)
    wait_for(lambda: lock.exists() and (folder / "segment").exists(), 20)
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def test_only_its_owner_may_read_a_segment(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        shard = Shard(str(folder_of(tmp_path, "q")), str(folder_of(tmp_path / "disk", "q")))
    finally:
        os.umask(before)
    for folder in (shard.folder, shard.folder.parent, shard.spill_folder, shard.spill_folder.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert shard.folder.with_name("s.lock").stat().st_mode & 0o777 == 0o600


def test_a_shard_that_ray_starts_through_another_program_belongs_to_its_raylet(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as raylet:
        monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
        os.close(own(folder_of(tmp_path, "wrapped")))
        sweep(tmp_path)
        assert "wrapped" in left(tmp_path), "its raylet lives"
        raylet.kill()
    sweep(tmp_path)
    assert not left(tmp_path)
