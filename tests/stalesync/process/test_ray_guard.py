"""A controller that ends, however it does, leaves no process of its Ray and no segments of its queue behind; other
processes are left alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from distqueue.payload.sweep import PREFIX
from stalesync.process.ray_guard import Members, end_session, marking
from tests.machine import communicate, patience, running, wait_for, within

CONTROLLER = """
import os, subprocess, sys, time
from stalesync.process.ray_guard import guarded, marking

root = sys.argv[1]
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
shard = [sys.executable, "-c", '''
import sys, time
from pathlib import Path
from distqueue.payload.sweep import own
own(Path(sys.argv[1]))
print(flush=True)
time.sleep(600)
''', f"{root}/distqueue-1/shard"]
with guarded([root]) as guard:
    with marking(guard.mark):
        raylet = subprocess.Popen([sys.executable, "-c", '''
import subprocess, sys, time
shard = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, start_new_session=True)
shard.stdout.readline()
print(shard.pid, flush=True)
time.sleep(600)
''', *shard], stdout=subprocess.PIPE, text=True)
        member = int(raylet.stdout.readline())
    other = subprocess.Popen(sleep, start_new_session=True)
    print(raylet.pid, member, other.pid, guard.folder, flush=True)
    if sys.argv[2] == "raises":
        raylet.kill()
        raise SystemExit(3)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_nothing_of_a_ray_is_left_when_its_controller_has_ended(tmp_path, how):
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path), how]
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    *pids, folder = controller.stdout.readline().split()
    raylet, member, other = map(int, pids)
    assert Path(folder).parent == Path(os.environ["RAY_TMPDIR"]) and Path(folder).is_dir()
    guards = _guards(controller.pid)
    try:
        if how == "killed":
            controller.kill()
            controller.wait()
            os.kill(raylet, 9)  # Ray's own: it dies with the process that started it
            assert running(member) and (tmp_path / f"{PREFIX}1").is_dir()
            wait_for(lambda: not any(map(running, guards)), 30)
        else:
            assert controller.wait() == 3 and not any(map(running, guards))
        assert not running(member) and not [*tmp_path.iterdir()] and not Path(folder).exists()
        assert running(other), "not started by its Ray"
    finally:
        for pid in (member, other):
            if running(pid):
                os.kill(pid, 9)


IMPATIENT = """
from stalesync.process import ray_guard

soon = "from stalesync.process import ray_guard as guard; guard.FROZEN_S = guard.FROZEN_STOP_S = 0.5; main("
ray_guard.BOOT = ray_guard.BOOT.replace("main(", soon)
"""
"""Of a controller: its guard waits half a second for what a frozen one cannot do"""

STARTING = """
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path
from stalesync.process.ray_guard import LEAVING, STARTED, Report, guarded, marking

folder, how, patience_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
with guarded([], Report(str(folder), 1)) as guard:
    with marking(guard.mark):
        die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as Ray's do
        words, stdin = (["-c", "read line; exit 1"], subprocess.PIPE) if how == "gives up" else (["600"], None)
        raylet = subprocess.Popen([folder / "raylet", *words], preexec_fn=die_with_parent, stdin=stdin)
    print(raylet.pid, flush=True)
    sys.stdin.readline()
    if how == "exits":
        os._exit(1)
    if how in ("ends", "reports"):
        guard.send(STARTED)
    if how == "reports":
        guard.send(LEAVING)
    if how == "gives up":
        raylet.stdin.close()
    elif how != "killed":
        raylet.kill()
    if how in ("ends", "reports"):
        time.sleep(patience_s)
        os._exit(1)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    "how, status, reported",
    [
        pytest.param("ends", 1, 1, marks=pytest.mark.extended),
        ("hangs", -9, 1),
        ("gives up", -9, 1),
        ("reports", 1, 0),
        ("killed", -9, 0),
    ],
)
def test_the_end_of_a_controller_that_the_end_of_ray_has_caused_is_reported(tmp_path, how, status, reported):
    shutil.copy(shutil.which("bash" if how == "gives up" else "sleep"), tmp_path / "raylet")
    command = [sys.executable, "-c", IMPATIENT + STARTING, str(tmp_path), how, str(patience(1))]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    controller = subprocess.Popen(command, **pipes, text=True)
    raylet = int(controller.stdout.readline())
    guards = _guards(controller.pid)
    wait_for(lambda: _watches(*guards), 30)
    controller.stdin.write("\n")
    controller.stdin.flush()
    if how == "killed":
        controller.kill()
    _, err = communicate(controller, 60)  # nobody holds the standard error for longer
    assert controller.returncode == status
    why = "by itself, with status 1: it" if how == "gives up" else "killed, out of host memory, or crashed)"
    assert err.count(f"error: Ray's process raylet has ended ({why}") == reported
    assert (tmp_path / "run.log").exists() == (tmp_path / "error.json").exists() == bool(reported)
    wait_for(lambda: not any(map(running, [raylet, *guards])), 30)


def test_a_raylet_is_named_that_ends_the_controller_before_its_own_end_is_seen(tmp_path):
    """Ray's C++ ends the controller with status 1 when the raylet closes its connection."""
    shutil.copy(shutil.which("sleep"), tmp_path / "raylet")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", STARTING, str(tmp_path), "exits", "0"]
    controller = subprocess.Popen(command, **pipes, text=True)
    controller.stdout.readline()
    wait_for(lambda: _watches(*_guards(controller.pid)), 30)
    controller.stdin.write("\n")
    controller.stdin.flush()
    _, err = communicate(controller, 60)
    assert controller.returncode == 1 and err.count("error: Ray's process raylet has ended") == 1


@pytest.mark.parametrize("first", ["raylet", "controller"])
def test_the_one_that_ended_first_is_known_to_a_guard_that_finds_both_ended(tmp_path, first):
    shutil.copy(shutil.which("sleep"), tmp_path / "raylet")
    command = [sys.executable, "-c", STARTING, str(tmp_path), "exits", "0"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    controller = subprocess.Popen(command, **pipes, text=True)
    raylet, (guard,) = int(controller.stdout.readline()), _guards(controller.pid)
    wait_for(lambda: _watches(guard), 30)
    wait_for(lambda: _stopped_in_poll(guard), 30)
    try:
        if first == "raylet":
            os.kill(raylet, signal.SIGKILL)
            wait_for(lambda: not running(raylet), 30)
            controller.stdin.write("\n")
            controller.stdin.flush()
        else:
            controller.kill()
        assert controller.wait(patience(30)) == (1 if first == "raylet" else -9)
        wait_for(lambda: not running(raylet), 30)
    finally:
        os.kill(guard, signal.SIGCONT)
    _, err = communicate(controller, 60)
    assert err.count("error: Ray's process raylet has ended") == err.count("error:") == (first == "raylet")
    assert (tmp_path / "error.json").exists() == (first == "raylet")
    wait_for(lambda: not running(guard), 30)


EPOLL_WAIT = {"232", "281", "22"}
"""Numbers of the system calls `epoll_wait` and `epoll_pwait` on x86-64, and on ARM"""


def _stopped_in_poll(guard):
    """Stops the guard; continues it unless it waits for events."""
    os.kill(guard, signal.SIGSTOP)
    wait_for(lambda: "\nState:\tT" in Path(f"/proc/{guard}/status").read_text(), 30)
    if Path(f"/proc/{guard}/syscall").read_text().split()[0] in EPOLL_WAIT:
        return True
    os.kill(guard, signal.SIGCONT)
    return False


def _watches(guard):
    """Whether the guard watches the controller and the raylet that it has started."""

    def target(fd):
        with suppress(FileNotFoundError):  # closed meanwhile
            return os.readlink(fd)
        return ""

    return sum("pidfd" in target(fd) for fd in Path(f"/proc/{guard}/fd").iterdir()) >= 2


def _guards(controller):
    """The guards of a process, by what they are told. Waits for one: until it executes, it looks like its parent."""
    return wait_for(lambda: _find_guards(controller), 20)


def _find_guards(controller):
    found = []
    for folder in Path("/proc").iterdir():
        try:
            *_, options = (folder / "cmdline").read_text().rstrip("\0").split("\0")
            if json.loads(options)["controller"] == controller:
                found.append(int(folder.name))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    assert len(found) <= 1
    return found


TITLED = """
import sys, time
from ray._raylet import setproctitle
setproctitle("ray::RuntimeEnvAgent")
print(flush=True)
time.sleep(600)
"""


def test_an_agent_of_ray_keeps_its_mark_when_it_writes_its_title():
    with marking("mark-of-an-agent"):
        agent = subprocess.Popen([sys.executable, "-c", TITLED], stdout=subprocess.PIPE)
    with agent:
        agent.stdout.readline()
        try:
            assert b"RuntimeEnvAgent" in Path(f"/proc/{agent.pid}/cmdline").read_bytes()
            assert Members("mark-of-an-agent").look() == [agent.pid]
        finally:
            agent.kill()
    assert "SPT_NOENV" not in os.environ


UNMARKED = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={}, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_a_process_with_the_mark_has_started_belongs_to_it_also_when_it_has_ended():
    with marking("mark-of-a-raylet"):
        raylet = subprocess.Popen([sys.executable, "-c", UNMARKED], stdout=subprocess.PIPE, text=True)
    with raylet:
        agent = int(raylet.stdout.readline())
        try:
            assert not Members("mark-of-another").look()
            members = Members("mark-of-a-raylet")
            assert sorted(members.look()) == sorted([raylet.pid, agent])
            raylet.kill()
            raylet.wait()
            assert members.look() == [agent]
        finally:
            raylet.kill()
            os.kill(agent, 9)
    wait_for(lambda: not members.look(), 20)


def test_what_is_left_of_a_ray_that_has_not_started_is_killed_at_once():
    with marking("mark-of-a-start"):
        raylet = subprocess.Popen([sys.executable, "-c", UNMARKED], stdout=subprocess.PIPE, text=True)
    with raylet:
        agent, start_s = int(raylet.stdout.readline()), time.monotonic()
        end_session("mark-of-a-start", [], grace_s=0.0)
        assert within(time.monotonic() - start_s, 2) and not running(agent)
        assert raylet.wait() == -9


def test_the_guard_reports_without_torch_and_ray_which_take_seconds_to_import():
    modules = "stalesync.process.ray_guard, stalesync.process.run_log, stalesync.process.failures"
    check = f"import sys, {modules}; print(*{{'torch', 'ray', 'transformers'}} & sys.modules.keys())"
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (loaded.stdout.strip(), loaded.stderr) == ("", "")


FROZEN = """
import ctypes, signal, subprocess, sys
from stalesync.process.ray_guard import Report, guarded, marking
from stalesync.process.stopping import keeping_handlers, stoppable

with stoppable(), guarded([], Report(sys.argv[1], 1)) as guard:
    with keeping_handlers(), marking(guard.mark):
        raylet = subprocess.Popen(["sleep", "600"])
        print(raylet.pid, flush=True)
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter, as Ray does while it connects
"""


@pytest.mark.parametrize(("number", "message"), [(2, "stopped by Ctrl-C"), (15, "stopped by SIGTERM")])
def test_a_controller_that_is_frozen_in_the_start_of_ray_is_ended_by_a_signal(tmp_path, number, message):
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    controller = subprocess.Popen([sys.executable, "-c", IMPATIENT + FROZEN, str(tmp_path)], **pipes, text=True)
    raylet = int(controller.stdout.readline())
    time.sleep(0.2)
    controller.send_signal(number)
    _, err = communicate(controller, 60)
    assert (controller.returncode, err) == (-9, f"{message}\n")
    wait_for(lambda: not running(raylet), 30)
