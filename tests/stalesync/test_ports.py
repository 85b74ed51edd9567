"""What a run opens is what docs/security.md lists: nothing that another machine reaches, by no other process."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

from tests.sockets import listening, unix_paths
from tests.stalesync.runs import descendants

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"

PROCESSES = {
    "gcs_server": r"gcs_server",
    "raylet": r"raylet/raylet",
    "dashboard agent": r"dashboard[/.]agent|ray::DashboardAgent",
    "runtime env agent": r"runtime_env[/.]agent|ray::RuntimeEnvAgent",
    "ray::Card": r"^ray::Card",
    "ray::QueueActor": r"^ray::QueueActor",
    "ray::Shard": r"^ray::Shard",
    "ray::TextServer": r"^ray::TextServer",
    "ray::KVServer": r"^ray::KVServer",
    "ray::IDLE": r"^ray::IDLE",
}
"""As the page names them, and how their command lines look"""


def documented():
    """(process, kind) of every row of the page's table."""
    rows = re.findall(r"^\| (`[^|]+) \| (tcp|unix) \|", PAGE.read_text(), re.MULTILINE)
    return {(name, kind) for names, kind in rows for name in re.findall(r"`([^`]+)`", names)}


def name_of(pid, command, controller):
    if pid == controller:
        return "controller"
    return next((name for name, pattern in PROCESSES.items() if re.search(pattern, command)), command)


def check_ports(run):
    """Asserts it of a running run."""
    below = descendants(run.pid).items()
    commands = {pid: line for pid, line in below if "tests.harness.launches" not in line} | {run.pid: ""}
    opened = {(name_of(pid, line, run.pid), one) for pid, line in commands.items() for one in listening(pid)}
    assert {"controller", "raylet", "gcs_server", "ray::Card"} <= {name for name, _ in opened}, opened
    assert not (reachable := [one for one in opened if not one[1].local]), reachable
    unknown = {(name, one.kind) for name, one in opened} - documented()
    assert not unknown, f"{unknown} are not in {PAGE.name}: {opened}"
    for name, one in opened:
        if one.kind == "unix" and not one.address.startswith("@"):
            mode = os.stat(one.address).st_mode
            assert stat.S_ISSOCK(mode) and not mode & 0o022, f"{name}: others may write to {one.address}"
    paths = {path for pid in commands for path in unix_paths(pid)}
    assert {path.name for path in paths} >= {"raylet", "plasma_store"}, "those that the processes connect to, too"
    for path in paths:
        check_folders(path)
    (session,) = {path.parents[1] for path in paths if path.name == "raylet"}
    check_strangers_cannot_plant(session)


def check_folders(path):
    """Asserts that only this user and root can replace a socket: the run's own folder lets nobody else in, and what is
    above it belongs to one of them, and is writable by others only with a sticky bit."""
    above = [*path.parents]
    own = next(folder for folder in above if not folder.stat().st_mode & 0o077)
    assert own.parent == Path(os.environ["RAY_TMPDIR"]) and own.stat().st_uid == os.getuid(), own
    for folder in above[above.index(own) :]:
        about = folder.lstat()
        assert stat.S_ISDIR(about.st_mode) and about.st_uid in (0, os.getuid()), folder
        assert not about.st_mode & 0o022 or about.st_mode & stat.S_ISVTX, f"{folder}: {about.st_mode:o}"


PLANT = """
import os, sys
os.setgid(65533), os.setuid(65533)
for name in ("logs/planted", "sockets/planted", "planted"):
    try:
        os.symlink("/etc/hostname", f"{sys.argv[1]}/{name}")
    except PermissionError:
        continue
    sys.exit(f"{name} could be planted")
"""


def check_strangers_cannot_plant(session):
    """Asserts that another user cannot put a link among Ray's files, which Ray would follow."""
    assert (session / "logs").stat().st_mode & 0o777 == 0o777, "Ray itself would let all users write"
    if os.getuid() == 0:
        planted = subprocess.run([sys.executable, "-c", PLANT, str(session)], capture_output=True, text=True)
        assert planted.returncode == 0, planted.stderr


def test_the_page_lists_every_kind_of_process():
    names = {name for name, _ in documented()}
    assert names == {*PROCESSES, "controller"}
