"""A process of Ray that ends is noticed at once, and only those that this process has started count."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from distqueue import QueueClosed
from stalesync.process import ray_processes
from stalesync.process.failures import QueueFailed, RayEnded, naming_queue
from stalesync.process.process_ends import ProcessStat
from stalesync.process.ray_processes import (
    GIVE_UP_S,
    WATCH_S,
    RayProcesses,
    started_by,
    watching_end,
    watching_start,
)
from stalesync.process.stopping import acknowledging, raise_in_main, stoppable
from tests.machine import patience, wait_for, within


def children_of(parent):
    """The names of a process's children that have not ended, by process id."""
    children = {pid: one for pid, one in ProcessStat.of_all().items() if one.parent == parent}
    return {pid: one.name for pid, one in children.items() if one.state not in "ZX"}


def test_the_end_of_a_child_is_noticed_by_its_name(tmp_path):
    for name in ("gcs_server", "raylet", "other"):
        shutil.copy(shutil.which("sleep"), tmp_path / name)
    started = {name: subprocess.Popen([tmp_path / name, "60"]) for name in ("gcs_server", "raylet", "other")}
    try:
        assert {children_of(os.getpid())[process.pid] for process in started.values()} == {*started}
        with closing(RayProcesses()) as processes:
            started["other"].kill()
            started["other"].wait()
            processes.check()
            started["raylet"].kill()
            started["raylet"].wait()
            with pytest.raises(RayEnded, match="Ray's process raylet has ended"):
                processes.check()
    finally:
        for process in started.values():
            process.kill()
            process.wait()


ENDS = pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("exit 1", "by itself, with status 1: it gave up waiting"),
        ("kill -9 $$", "killed, out of host memory, or crashed"),
        ("kill -XFSZ $$", "it exceeded this process's limit on the size of files: increase ulimit -f"),
    ],
)


@ENDS
def test_a_raylet_that_gave_up_is_not_called_killed(tmp_path, end, reason):
    raylet = tmp_path / "raylet"
    shutil.copy(shutil.which("bash"), raylet)
    process = subprocess.Popen([raylet, "-c", f"read line; {end}"], stdin=subprocess.PIPE)
    with closing(RayProcesses(["raylet"])) as processes:
        process.stdin.close()
        wait_for(processes.ended, 20)
        with pytest.raises(RayEnded, match=re.escape(f"Ray's process raylet has ended ({reason}")):
            processes.check()
    process.wait()


def test_a_process_that_ends_while_ray_starts_is_given_up_from_another_thread(tmp_path):
    shutil.copy(shutil.which("sleep"), tmp_path / "gcs_server")
    given_up, ended = [], threading.Event()

    def give_up(error):
        given_up.append(str(error))
        ended.set()

    with watching_start(give_up):
        with subprocess.Popen([tmp_path / "gcs_server", "60"]) as process:
            wait_for(lambda: process.pid in children_of(os.getpid()), 10)
            time.sleep(2 * WATCH_S)
            process.kill()
        assert ended.wait(patience(20))
    assert len(given_up) == 1 and "Ray's process gcs_server has ended" in given_up[0]


@ENDS
def test_while_ray_starts_the_end_is_named_by_its_exit_status(tmp_path, end, reason):
    shutil.copy(shutil.which("bash"), tmp_path / "raylet")
    given_up, ended = [], threading.Event()
    with watching_start(lambda error: (given_up.append(str(error)), ended.set())):
        process = subprocess.Popen([tmp_path / "raylet", "-c", end])
        assert ended.wait(patience(20))
    process.wait()
    assert len(given_up) == 1 and f"Ray's process raylet has ended ({reason}" in given_up[0]


def test_a_process_that_ends_before_it_was_seen_is_given_up_too(tmp_path):
    shutil.copy(shutil.which("sleep"), tmp_path / "raylet")
    with subprocess.Popen([tmp_path / "raylet", "0"]) as earlier:
        wait_for(lambda: earlier.pid not in children_of(os.getpid()), 10)  # a zombie of an earlier Ray
        given_up, ended = [], threading.Event()
        with watching_start(lambda error: (given_up.append(str(error)), ended.set())):
            assert not ended.wait(GIVE_UP_S + 3 * WATCH_S)
            process = subprocess.Popen([tmp_path / "raylet", "60"])
            process.kill()
            assert ended.wait(patience(20))
        process.wait()
    assert len(given_up) == 1 and "Ray's process raylet has ended" in given_up[0]


def test_ray_that_reports_the_end_of_a_process_itself_is_not_given_up(tmp_path):
    shutil.copy(shutil.which("sleep"), tmp_path / "raylet")
    given_up = []
    with pytest.raises(RuntimeError, match="of Ray"), watching_start(given_up.append):
        with subprocess.Popen([tmp_path / "raylet", "60"]) as process:
            time.sleep(2 * WATCH_S)
            process.kill()
        raise RuntimeError("of Ray")
    assert not given_up and "watch Ray" not in {thread.name for thread in threading.enumerate()}


def test_without_children_of_that_name_nothing_is_watched():
    with closing(RayProcesses(names=("no such process",))) as processes:
        processes.check()


def test_several_threads_may_check_at_once():
    child = subprocess.Popen(["sleep", "60"])
    try:
        with closing(RayProcesses(names=("sleep",))) as processes, ThreadPoolExecutor(4) as pool:
            for checked in [pool.submit(lambda: [processes.check() for _ in range(3000)]) for _ in range(4)]:
                checked.result()
    finally:
        child.kill()
        child.wait()


def test_a_queue_that_ends_with_ray_is_not_named():
    polled = []

    def check_ray():
        polled.append(None)
        if len(polled) > 3:  # as the raylet kills the queue before it ends
            raise RayEnded("raylet")

    with pytest.raises(RayEnded, match="raylet has ended"), naming_queue(check_ray):
        raise QueueClosed("the queue's actor has ended")
    with pytest.raises(QueueFailed, match="actor has ended"), naming_queue(lambda: None):
        raise QueueClosed("the queue's actor has ended")


def test_a_process_of_which_nothing_is_left_has_ended(tmp_path):
    shutil.copy(shutil.which("sleep"), tmp_path / "gcs_server")
    before = started_by(os.getpid())  # perhaps the raylet of another test's Ray
    with subprocess.Popen([tmp_path / "gcs_server", "60"]) as process:
        try:
            with (
                closing(RayProcesses(before=before, complete=True)) as processes,
                pytest.raises(RayEnded, match="process raylet"),
            ):
                processes.check()  # it has ended and was reaped before it was seen
            with closing(RayProcesses(before=before)) as processes:
                processes.check()
        finally:
            process.kill()


def _ended_raylet(tmp_path):
    shutil.copy(shutil.which("sleep"), tmp_path / "raylet")
    process = subprocess.Popen([tmp_path / "raylet", "60"])
    wait_for(lambda: children_of(os.getpid()).get(process.pid) == "raylet", 20)
    return process


def test_a_run_that_waits_in_a_call_of_ray_is_interrupted_when_one_has_ended(tmp_path):
    given_up, start_s = [], time.monotonic()
    with _ended_raylet(tmp_path) as process, closing(RayProcesses()) as processes:
        with pytest.raises(RayEnded, match="raylet has ended"), stoppable(), acknowledging():
            with watching_end(processes, raise_in_main, given_up.append):
                process.kill()
                time.sleep(patience(60))
    assert within(time.monotonic() - start_s, 6) and not given_up
    assert "watch Ray" not in {thread.name for thread in threading.enumerate()}


def test_a_run_that_cannot_be_interrupted_is_given_up(tmp_path, monkeypatch):
    for name in ("NOTICE_S", "LEAVE_S"):
        monkeypatch.setattr(ray_processes, name, 0.1)
    calls, ended = [], threading.Event()

    def give_up(error):
        calls.append(("give up", str(error)))
        ended.set()

    with _ended_raylet(tmp_path) as process, closing(RayProcesses()) as processes:
        with watching_end(processes, lambda error: calls.append(("interrupt", str(error))), give_up):
            process.kill()
            assert ended.wait(patience(20))
    assert [act for act, _ in calls] == ["interrupt", "give up"] and all("raylet" in error for _, error in calls)


def test_a_run_that_notices_by_itself_is_left_alone(tmp_path):
    calls = []
    with _ended_raylet(tmp_path) as process, closing(RayProcesses()) as processes:
        with watching_end(processes, calls.append, calls.append):
            process.kill()
            wait_for(processes.ended, 20)
    assert not calls
