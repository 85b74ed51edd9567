"""Hosts made of namespaces on this machine: what runs in one sees a host of its own.

    Hosts(2, shared=…)     host-a (10.73.0.1), host-b (10.73.0.2), …: own processes, network interface, host name,
                           /etc/hosts, /dev/shm and /tmp; the same file system but for those
      .run("host-a", command)       to its end     .start("host-a", command)       Popen
      .kill("host-b")               all its processes, at once, as a power cut would
      .cut("host-b") .mend(…)       its link, as if the cable was pulled
      .slow("host-b", kbit_per_s)   its link

A bridge in a network namespace of its own connects the hosts; there is no way out of it, and no route to elsewhere. As
on Debian, /etc/hosts of a host maps its own name to 127.0.1.1, and those of the others to their addresses.

Everything is unnamed and belongs to processes: the first process of a host waits for the end of a pipe from this
process. So whatever ends this process ends the hosts with all that runs in them, and the kernel removes the namespaces:
there is nothing to sweep.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests import machine

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")

INIT = 'trap "" TERM INT HUP; echo ready; while read -r _; do :; done'
"""The first process of a host, a shell: it also reaps what has lost its parent."""

PATIENCE = ("raylet_start_wait_time_s", "gcs_server_port_wait_time_s", "gcs_server_request_timeout_seconds",
            "worker_register_timeout_seconds")  # fmt: skip
RAY = {f"RAY_{name}": "300" for name in PATIENCE} | {"RAY_agent_register_timeout_ms": "300000"}
"""As in `tests/conftest.py`: a busy machine needs more time than Ray gives; else raylets end while they start"""


@cache
def why_not() -> str:
    """Says why no hosts can be made here; "": they can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child",
         "sh", "-c", "ip link add name rl-br type bridge && ip link add name rl-0 type veth peer name rl-1"],
        capture_output=True, text=True,
    )  # fmt: skip
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """Makes ``count`` hosts; use it as a context manager.

    Args:
        shared: a folder that all hosts see at the same path, although it is below /tmp.
        own: folders that every host has for itself, empty, in place of what is there.
    """

    def __init__(self, count: int, shared: Path, own: tuple[Path, ...] = ()) -> None:
        self.shared = shared
        self.names = [f"host-{chr(ord('a') + index)}" for index in range(count)]
        self.address = {name: f"10.73.0.{index + 1}" for index, name in enumerate(self.names)}
        self._folder = Path(tempfile.mkdtemp(prefix=".hosts-", dir=shared))
        self._inits: dict[str, subprocess.Popen[str]] = {}
        self._pids: dict[str, int] = {}
        try:
            self._unshare("switch", "--net")
            self._in_switch("ip link add name br0 type bridge && ip link set br0 up")
            for name in self.names:
                self._make(name, own)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all hosts with everything that runs in them."""
        for init in self._inits.values():
            init.kill()  # with --kill-child
        for init in self._inits.values():
            init.wait()
            for pipe in (init.stdin, init.stdout):
                assert pipe is not None
                pipe.close()
        self._inits = {}
        shutil.rmtree(self._folder, ignore_errors=True)

    def pid(self, name: str) -> int:
        """The first process of a host, as this process sees it."""
        return self._pids[name]

    def command(self, name: str, command: list[str], **environment: str) -> list[str]:
        """The command with which ``command`` runs in a host, as if its user had logged in there."""
        variables = [f"{key}={value}" for key, value in (self.login() | environment).items()]
        enter = ["nsenter", f"--target={self.pid(name)}", "--net", "--uts", "--ipc", "--mount", "--pid"]
        return [*enter, "env", "-i", f"--chdir={ROOT}", *variables, *command]

    def login(self) -> dict[str, str]:
        """The environment of a user who logs in: Python's is active, this checkout is the one that is imported, and
        what the emulated NPU has built is at hand. The home folder is the host's own."""
        cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return {
            "HOME": "/tmp/home",
            "PATH": f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": cache_home,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **RAY,
        }

    def start(self, name: str, command: list[str], environment: dict[str, str] | None = None, **options: Any):
        """`subprocess.Popen` of text in a host, both outputs in pipes."""
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | options
        return subprocess.Popen(self.command(name, command, **(environment or {})), **pipes)

    def run(self, name: str, command: list[str], timeout_s: float = 60, **environment: str):
        """`subprocess.run` of text in a host."""
        entered = self.command(name, command, **environment)
        return machine.run(entered, timeout_s, stdin=subprocess.DEVNULL)

    def kill(self, name: str) -> None:
        """Ends all processes of a host at once; its link goes with it."""
        os.kill(self.pid(name), signal.SIGKILL)
        self._inits[name].wait()

    def cut(self, name: str) -> None:
        """Pulls the cable of a host: nothing arrives, and nobody is told."""
        self._in_switch(f"ip link set {_port(name)} down")

    def mend(self, name: str) -> None:
        self._in_switch(f"ip link set {_port(name)} up")

    def slow(self, name: str, kbit_per_s: int) -> None:
        """Limits the link of a host, both ways."""
        limit = f"root tbf rate {kbit_per_s}kbit burst 16kb latency 400ms"
        self._in_switch(f"tc qdisc replace dev {_port(name)} {limit}")
        self._inside(name, f"tc qdisc replace dev eth0 {limit}")

    def processes(self, name: str) -> list[str]:
        """Command lines of what runs in a host, without its first process."""
        listing = self.run(name, ["ps", "-eo", "pid=,args="]).stdout.splitlines()
        return [line.strip() for line in listing if line.split()[0] != "1" and "ps -eo" not in line]

    def ssh(self, folder: Path, **environment: str) -> Path:
        """Writes a command `ssh` that enters hosts by name into a folder for PATH; returns the folder. ``environment``:
        of who logs in, in addition."""
        folder.mkdir(parents=True, exist_ok=True)
        cases = [f'  {name}) exec {shlex.join(self.command(name, [], **environment))} "$@" ;;' for name in self.names]
        script = folder / "ssh"
        script.write_text(
            "#!/bin/sh\n# ssh [-o OPTION]... HOST COMMAND...\n"
            'while [ "$1" = -o ]; do shift 2; done\n'
            "host=${1#*@}; shift\n"
            'case "$host" in\n' + "\n".join(cases) + '\n  *) echo "ssh: unknown host $host" >&2; exit 255 ;;\nesac\n'
        )
        script.chmod(0o700)
        return folder

    def _make(self, name: str, own: tuple[Path, ...]) -> None:
        self._unshare(name, "--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc")
        port = _port(name)
        self._in_switch(
            f"ip link add name {port} type veth peer name eth0 netns /proc/{self.pid(name)}/ns/net && "
            f"ip link set {port} master br0 up"
        )
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {name}"]
        lines += [f"{address} {other}" for other, address in self.address.items() if other != name]
        etc_hosts, tmp = self._folder / f"{name}.hosts", self._folder / f"{name}.tmp"
        etc_hosts.write_text("\n".join(lines) + "\n")
        tmp.mkdir()
        seen = [ROOT, Path(sys.prefix), self.shared, Path(self.login()["XDG_CACHE_HOME"])]
        binds = [
            f"mkdir -p {tmp}/{path.relative_to('/tmp')} && mount --bind {path} {tmp}/{path.relative_to('/tmp')}"
            for path in seen
            if path.is_relative_to("/tmp") and path.is_dir()
        ]
        self._inside(
            name,
            "set -e",
            f"hostname {name}",
            "ip link set lo up",
            f"ip addr add {self.address[name]}/24 dev eth0",
            "ip link set eth0 up",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
            f"mount --bind {etc_hosts} /etc/hosts",
            f"mount -t tmpfs -o mode=1777 tmpfs {tmp}",
            *binds,
            f"mount --rbind {tmp} /tmp",
            "mkdir -m 700 /tmp/home",
            *(f"mkdir -p {path} && mount -t tmpfs -o mode=755 tmpfs {path}" for path in own),
        )

    def _unshare(self, name: str, *namespaces: str) -> None:
        """Starts the first process of new namespaces."""
        fork = ["--fork", "--kill-child"]
        init = subprocess.Popen(
            ["unshare", *fork, *namespaces, "bash", "-c", INIT],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._inits[name] = init
        assert init.stdout is not None
        assert init.stdout.readline() == "ready\n", f"{name} did not start"
        children = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
        self._pids[name] = int(children[0])

    def _in_switch(self, script: str) -> None:
        _check(["nsenter", f"--target={self.pid('switch')}", "--net", "sh", "-c", script])

    def _inside(self, name: str, *lines: str) -> None:
        enter = ["nsenter", f"--target={self.pid(name)}", "--net", "--uts", "--ipc", "--mount", "--pid"]
        _check([*enter, "sh", "-c", "\n".join(lines)])


def _port(name: str) -> str:
    """The end of a host's link at the switch."""
    return f"to-{name}"


def _check(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"


if __name__ == "__main__":  # for trying things: python -m tests.hosts.namespaces 2 SHARED_FOLDER
    with Hosts(int(sys.argv[1]), Path(sys.argv[2]).resolve()) as hosts:
        print(json.dumps({name: shlex.join(hosts.command(name, ["bash"])) for name in hosts.names}, indent=2))
        input("Enter ends the hosts ")
