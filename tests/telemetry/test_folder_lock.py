"""One run at a time has a folder: the kernel keeps the lock, and whoever comes second is told who has it."""

import os
import signal
import subprocess
import sys

import pytest

from fusion.telemetry import RunFolder
from fusion.telemetry.files import read_jsonl
from fusion.telemetry.folder_lock import NAME, FolderInUse, FolderLock, is_held
from tests.machine import wait_for

HOLDER = """
import os, sys, time
from fusion.telemetry import RunFolder
run = RunFolder(sys.argv[1], "run", "resume")
run.log(1, {"a": 1.0})
begun, begins = os.pipe()
if os.fork() == 0:
    os.write(begins, b"1")
    time.sleep(600)
os.read(begun, 1)  # the child lets go of the lock when it begins
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_second_run_of_a_name_is_refused_and_named_its_holder_until_that_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, cwd=os.getcwd(), start_new_session=True
    )
    try:
        assert int(holder.stdout.readline()) == holder.pid
        with pytest.raises(FolderInUse, match=rf"run.name=run: .* is in use by process {holder.pid} on .*, since 20"):
            RunFolder(tmp_path, "run", "resume")
        assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 1, "nothing in it was changed"
        assert RunFolder(tmp_path, "run").name == "run-2", "another name is free"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        # Its child lives, and has inherited every open file.
        with RunFolder(tmp_path, "run", "resume") as run:
            assert run.resumed
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate()


def test_whether_a_lock_is_held_is_found_out_without_taking_it(tmp_path):
    assert not is_held(tmp_path)
    lock = FolderLock(tmp_path)
    assert is_held(tmp_path)
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path)
    lock.release()
    assert not is_held(tmp_path), "although the file still names this process"
    (tmp_path / NAME).write_text("[]")
    assert not is_held(tmp_path)


def test_a_lock_ends_with_release_or_with_its_object(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    again = FolderLock(tmp_path)
    del again
    FolderLock(tmp_path).release()


def test_a_child_that_ends_does_not_release_its_parents_lock(tmp_path):
    lock, child = FolderLock(tmp_path), os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path)
    lock.release()


def test_a_holder_that_has_not_written_its_name_yet_is_another_process(tmp_path):
    lock = FolderLock(tmp_path)
    (tmp_path / NAME).write_text("")
    with pytest.raises(FolderInUse, match="is in use by another process; stop"):
        FolderLock(tmp_path)
    lock.release()


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NAME).symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match="run.dir=.*symbolic link"):
        RunFolder(tmp_path, "run", "resume")
    assert not (tmp_path / "precious").exists()


def test_two_that_start_at_the_same_time_have_folders_of_their_own(tmp_path):
    command = [sys.executable, "-c", HOLDER.replace(', "resume"', ""), str(tmp_path)]
    holders = [
        subprocess.Popen(command, stdout=subprocess.PIPE, cwd=os.getcwd(), start_new_session=True) for _ in range(3)
    ]
    try:
        wait_for(lambda: len(list(tmp_path.glob("run*/metrics.jsonl"))) == 3, 60)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2", "run-3"]
    finally:
        for holder in holders:
            os.killpg(holder.pid, signal.SIGKILL)
            holder.communicate()
