"""Give the runs of a chain shared memory and a disk of their own, and find all their processes and what they leave.

    anchor   a process in a mount namespace of its own, in which /dev/shm and FOLDER/disk are new, empty file systems
    run      enters the namespace; whatever it starts stays there, in whichever session, group or parent it is

So that several chains can run at once, beside anything else, and a disk can be full for one of them only. Needs root,
or a kernel that lets users create namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.stalesync.runs import descendants
from tests.warm import Launcher

SHARED_MEMORY_MIB, DISK_MIB = 4096, 1024
"""Sizes of the file systems: bounds, no memory is taken before something is written"""

PATTERNS = {
    "worker": ("ray::Card",),
    "shard": ("ray::Shard",),
    "queue": ("ray::QueueActor",),
    "reward": ("fusion.rewards.child", "fusion.environments.child"),
    "raylet": ("/raylet/raylet ", "/raylet "),
    "gcs": ("/gcs_server ",),
}
"""What the command line of a victim contains; titles that Ray gives its workers are at its beginning"""


def victim_of(command: str) -> str | None:
    """Return which victim a process is, by its command line (arguments separated by spaces). Pure."""
    program = command.split(" ", 1)[0] + " "
    for victim, patterns in PATTERNS.items():
        for pattern in patterns:
            if (
                command.startswith(pattern)
                if pattern.startswith("ray::")
                else (program.endswith(pattern) if pattern.startswith("/") else pattern in command)
            ):
                return victim
    return None


class Space:
    """The namespace of a chain, until `close`.

    Args:
        folder: a short path, as Ray's sockets are below it.
        forks: by which its runs are started; None: as interpreters of their own.

    Raises:
        PermissionError: this user may not create namespaces.
    """

    def __init__(self, folder: Path, forks: Launcher | None = None) -> None:
        self._folder, self.forks, self.program = folder, forks, sys.executable
        self._servers: frozenset[int] = frozenset()
        for name in ("disk", "tmp", "ray", "forks"):
            (folder / name).mkdir(parents=True)
        as_user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
        mounts = " && ".join(
            f"mount -t tmpfs -o size={mib}m,mode=1777 none {path}" for path, mib in self._sizes().items()
        )
        self._anchor = subprocess.Popen(
            ["unshare", *as_user, "--mount", "--propagation", "private", "sh", "-c", f"{mounts} && echo && exec cat"],
            stdin=subprocess.PIPE,  # it ends with this process
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._anchor.stdout is not None and self._anchor.stderr is not None
        if not self._anchor.stdout.readline():
            raise PermissionError(f"no namespace for a chain: {self._anchor.stderr.read().decode().strip()}")
        pid = str(self._anchor.pid)
        enter = [] if os.getuid() == 0 else ["--user", "--preserve-credentials"]
        self.enter = ["nsenter", "--target", pid, *enter, "--mount"]
        self._root = Path("/proc", pid, "root")
        self.namespace = f"/proc/{pid}/ns/mnt"
        self._identity = os.readlink(self.namespace)
        if forks is not None:
            self.program = forks.open(self.namespace, str(folder / "forks"))
            self._servers = frozenset(self.commands())

    @property
    def runs(self) -> Path:
        """The folder of all runs, as processes in the namespace see it."""
        return self._folder / "disk"

    def seen(self, path: Path) -> Path:
        """Return the path of a file in the namespace, as this process sees it."""
        return self._root / path.relative_to("/")

    def environment(self) -> dict[str, str]:
        """Return the variables that keep temporary files in the folder."""
        return {"TMPDIR": str(self._folder / "tmp"), "RAY_TMPDIR": str(self._folder / "ray")}

    def commands(self) -> dict[int, str]:
        """Return the command lines of all processes in the namespace that have not ended, by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in self._servers | {self._anchor.pid}:
                try:
                    if os.readlink(entry / "ns" / "mnt") == self._identity:
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        if state_of(entry) not in "ZX":
                            found[int(entry.name)] = command.strip()
                except OSError:  # it has ended
                    continue
        return found

    def left_files(self) -> list[str]:
        """Return what is in shared memory, among the temporary files, and in the parent of Ray's folders."""
        places = (self.seen(Path("/dev/shm")), self._folder / "tmp", self._folder / "ray")
        return sorted(str(path.relative_to(self._root) if path.is_relative_to(self._root) else path)
                      for place in places for path in place.iterdir())  # fmt: skip

    def fill(self, what: str) -> None:
        """Leave no free space on a file system: its size becomes what it holds."""
        path = self._path(what)
        for _ in range(50):  # it may grow in between
            about = os.statvfs(self.seen(path))
            used = (about.f_blocks - about.f_bfree) * about.f_frsize
            if self._resize(path, str(max(used, about.f_frsize))):
                return
        raise RuntimeError(f"{what} could not be filled")

    def free(self, what: str) -> None:
        """Restore the size."""
        path = self._path(what)
        self._resize(path, f"{self._sizes()[path]}m")

    def clear(self, pids: Iterable[int] = ()) -> None:
        """Kill processes, and remove what Ray logged and what is left over, for the next start."""
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for place in (self._folder / "ray", self._folder / "tmp", self.seen(Path("/dev/shm"))):
            for path in place.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """End every process in the namespace, and with the last one its file systems."""
        self.clear({*self.commands(), *self._servers})
        self._anchor.kill()
        self._anchor.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _sizes(self) -> dict[Path, int]:
        return {Path("/dev/shm"): SHARED_MEMORY_MIB, self.runs: DISK_MIB}

    def _path(self, what: str) -> Path:
        return Path("/dev/shm") if what == "shared memory" else self.runs

    def _resize(self, path: Path, size: str) -> bool:
        remount = [*self.enter, "mount", "-o", f"remount,size={size}", str(path)]
        return subprocess.run(remount, stderr=subprocess.DEVNULL).returncode == 0


def state_of(process: Path) -> str:
    """Return the state of a process by its folder in /proc; Z: it has ended, and its parent has not noticed."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def anonymous_bytes() -> dict[str, int]:
    """Return the resident bytes that are not of files or shared, of this process and of all below it, by victim or name
    and process id."""
    found: dict[str, int] = {}
    for pid, command in [(os.getpid(), ""), *descendants(os.getpid()).items()]:
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        except (OSError, ValueError):
            continue
        named = victim_of(command) or (re.findall(r"ray::\w+|\w+\.py\b", command) or [status["Name"].strip()])[0]
        name = "controller" if pid == os.getpid() else named
        found[f"{name} {pid}"] = int(status.get("RssAnon", "0 kB").split()[0]) << 10
    return found
