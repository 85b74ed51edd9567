"""What a reward starts, forks or allocates ends with its sample, and costs no other."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusion.rewards import RewardConfig, RewardPool, RewardSample
from tests.machine import patience, running, wait_for
from tests.rewards.test_reward_pool import gone, pool_of, samples

USER = """
import os, signal, subprocess, sys, time

def start_daemon(path):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(path + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(path + ".new", path)
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not os.path.exists(path):
        time.sleep(0.001)

if os.environ.get("DAEMON_AT_IMPORT"):
    start_daemon(os.environ["DAEMON_AT_IMPORT"])

def last_file():
    # One that the pool's process has handed on has the number that it had there, however high.
    return max(map(int, os.listdir("/proc/self/fd")))

def reward(prompt, response, answer, path="", **fields):
    if response.startswith("daemon"):
        start_daemon(path)
    if response == "daemon, raise":
        raise KeyError("after it")
    if response == "daemon, hang":
        time.sleep(600)
    if response == "daemon, exit":
        os._exit(7)
    if response == "daemon, crash":
        os.kill(os.getpid(), 11)
    if response == "fork and return":
        return 1.0 if os.fork() else 7.0
    if response == "fork, wait and return":
        if child := os.fork():
            os.waitpid(child, 0)
            return 1.0
        return 7.0
    if response == "fork and raise":
        if child := os.fork():
            os.waitpid(child, 0)
            return 1.0
        raise KeyError("in the copy")
    if response == "fork and leave":
        if os.fork():
            os._exit(3)
        return 7.0
    if response == "fork and sleep":
        if os.fork() == 0:
            time.sleep(600)
        return 1.0
    if response == "kill the group":
        os.kill(0, signal.SIGKILL)
    if response == "close all files":
        os.closerange(3, 1 + last_file())
    if response == "write to all files":
        for fd in range(3, 1 + last_file()):
            try:
                os.write(fd, b"junk" * 16)
            except OSError:
                pass
    if response == "text":
        return len("x" * (1 << 30))
    if response == "list":
        return len(list(range(1 << 30)))
    if response == "kept":
        kept = globals().setdefault("kept", [])
        while True:
            kept.append(bytes(1 << 20))
    if response == "child":
        return subprocess.run([sys.executable, "-c", "'x' * (1 << 30)"], stderr=subprocess.DEVNULL).returncode
    return 1.0
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_reward.py"
    file.write_text(USER)
    return file


def one(response: str, path: Path) -> RewardSample:
    return RewardSample("prompt", response, "answer", {"path": str(path)})


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("daemon", None),
        pytest.param("daemon, raise", "raised", marks=pytest.mark.extended),
        pytest.param("daemon, hang", "timeout", marks=pytest.mark.extended),
        pytest.param("daemon, exit", "died", marks=pytest.mark.extended),
        ("daemon, crash", "died"),
    ],
)
def test_a_daemon_in_a_session_of_its_own_ends_with_the_sample_that_started_it(user_file, tmp_path, response, error):
    path = tmp_path / "daemon"
    with pool_of(user_file, time_limit_s=patience(2)) as pool:
        outcomes = pool.score([*samples("1"), one(response, path), *samples("1")])
        daemon = int(path.read_text())
        assert gone(daemon), "when its sample has its outcome, not when the pool ends"
    assert [outcome.error for outcome in outcomes] == [None, error, None]


def test_what_is_started_at_import_stays_until_the_pool_closes(user_file, tmp_path, monkeypatch):
    monkeypatch.setenv("DAEMON_AT_IMPORT", str(tmp_path / "daemon"))
    with pool_of(user_file, time_limit_s=patience(2)) as pool:
        other = tmp_path / "other"
        assert [o.reward for o in pool.score([one("daemon", other), *samples("1")])] == [1.0, 1.0]
        daemon = int((tmp_path / "daemon").read_text())
        assert running(daemon) and gone(int(other.read_text()))
    assert gone(daemon)


@pytest.mark.parametrize("killed", ["parent", "keeper"])
def test_daemons_and_children_end_when_the_process_above_them_is_killed(user_file, tmp_path, monkeypatch, killed):
    monkeypatch.setenv("DAEMON_AT_IMPORT", str(tmp_path / "daemon"))
    script = (
        "from fusion.rewards import *\n"
        f"pool = RewardPool(RewardConfig(path={f'{user_file}:reward'!r}, workers=1, time_limit_s=100))\n"
        "print(pool._children[0].process.pid, flush=True)\ninput()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    keeper = int(parent.stdout.readline())
    (child,) = _children(keeper) - {daemon := int((tmp_path / "daemon").read_text())}
    assert running(child) and running(daemon)
    if killed == "parent":
        parent.kill()
        parent.wait()
        assert gone(keeper) and gone(child) and gone(daemon)
    else:
        os.kill(keeper, signal.SIGKILL)
        assert gone(child)
        os.kill(daemon, signal.SIGKILL)
        parent.kill()
    parent.communicate()


def _children(pid: int) -> set[int]:
    table = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            table[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return {child for child, parent in table.items() if parent == pid}


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.extended), 2])
@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("fork and return", None),
        ("fork, wait and return", None),
        ("fork and raise", None),
        ("fork and sleep", None),
        ("fork and leave", "died"),
        ("kill the group", "died"),
        ("close all files", "died"),
        ("write to all files", "died"),
    ],
)
def test_a_copy_of_the_child_replies_to_nobody(user_file, response, error, workers):
    with pool_of(user_file, workers=workers, time_limit_s=patience(2)) as pool:
        for _ in range(3):
            outcomes = pool.score(samples("1", response, "1", "1"))
            assert [outcome.error for outcome in outcomes] == [None, error, None, None]
            assert [outcome.reward for outcome in outcomes] == [1.0, None if error else 1.0, 1.0, 1.0]


@pytest.mark.parametrize("response", ["text", "list", "kept"])
def test_memory_beyond_the_limit_costs_its_sample(user_file, response):
    with pool_of(user_file, memory_mib=256, time_limit_s=patience(20)) as pool:
        outcomes = pool.score(samples("1", response, "1", response))
        assert [outcome.error for outcome in outcomes] == [None, "memory", None, "memory"]
        assert pool.score(samples("1"))[0].reward == 1.0
    assert "exceeded the memory limit of 256 MiB (reward.memory_mib)" in outcomes[1].detail
    assert "in reward" in outcomes[1].detail and "MemoryError" in outcomes[1].detail


def test_the_limit_holds_for_what_a_sample_starts_and_null_is_none(user_file):
    with pool_of(user_file, memory_mib=256, time_limit_s=patience(20)) as pool:
        assert pool.score(samples("child"))[0].reward == 1.0
    with pool_of(user_file, memory_mib=None, time_limit_s=patience(20)) as pool:
        assert [outcome.reward for outcome in pool.score(samples("child", "text"))] == [0.0, float(1 << 30)]


def test_a_file_that_exceeds_the_memory_is_refused_by_name(tmp_path):
    (file := tmp_path / "large.py").write_text("kept = 'x' * (1 << 30)\ndef f(*texts): return 0.0\n")
    message = r"reward\.path=.*memory limit of 256 MiB \(reward.memory_mib\)"
    with pytest.raises(ValueError, match=message):
        RewardPool(RewardConfig(path=f"{file}:f", memory_mib=256))


def test_a_child_that_died_idle_is_replaced_though_its_keeper_still_runs(user_file):
    with pool_of(user_file) as pool:
        (child,) = _children(pool._children[0].process.pid)
        for _ in range(5):
            os.kill(child, signal.SIGKILL)
            wait_for(lambda child=child: not running(child), 5)
            assert pool.score(samples("1"))[0].reward == 1.0
            (child,) = _children(pool._children[0].process.pid)


def test_a_child_starts_where_its_parent_has_more_than_1024_descriptors(user_file):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with pool_of(user_file) as pool:
            assert pool.score(samples("1"))[0].reward == 1.0
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_ending_processes_costs_nothing_where_there_are_none(user_file):
    with pool_of(user_file) as pool:
        rows = samples(*["1"] * 512)
        pool.score(rows)
        started = time.perf_counter()
        pool.score(rows)
    assert time.perf_counter() - started < patience(0.2)
