"""A Ray cluster on hosts of `namespaces.py`, and runs on it, started as docs/stalesync.md, "Several hosts", says."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import machine
from tests.hosts.namespaces import Hosts
from tests.stalesync.runs import SMALL

PORT = 6379
CARDS_PER_HOST = 2
RAY = [f"{sys.prefix}/bin/ray", "start", "--disable-usage-stats", "--num-cpus=2"]
HEAD = ["--head", f"--port={PORT}", "--include-dashboard=false", '--system-config={"worker_niceness": 0}']


class Cluster:
    """Starts Ray on ``members`` of the hosts (unless ``start`` is false), of which the first is the head; all have the
    token."""

    def __init__(self, hosts: Hosts, members: Sequence[str] = (), start: bool = True) -> None:
        self.hosts, self.members = hosts, list(members or hosts.names)
        self.head, *others = self.members
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        if not start:
            return
        done = self.start_ray(self.head, [*HEAD, f"--node-ip-address={hosts.address[self.head]}"])
        assert done.returncode == 0, done.stdout + done.stderr
        joining = [
            hosts.start(name, [*RAY, f"--address={hosts.address[self.head]}:{PORT}"], self.token) for name in others
        ]
        for process in joining:
            out, err = machine.communicate(process, 60)
            assert process.returncode == 0, out + err

    def start_ray(self, name: str, options: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.run(name, [*RAY, *options], timeout_s=60, **(self.token | environment))

    def begin(self, base: Path, folder: Path, *overrides: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a run on the head that uses all cards."""
        return self.hosts.start(self.head, self.command(base, folder, *overrides), self.token, **options)

    def train(
        self, base: Path, folder: Path, *overrides: str, timeout_s: float = 180
    ) -> subprocess.CompletedProcess[str]:
        """Runs to the end."""
        return self.hosts.run(self.head, self.command(base, folder, *overrides), timeout_s, **self.token)

    def command(self, base: Path, folder: Path, *overrides: str) -> list[str]:
        cards = CARDS_PER_HOST * len(self.members)
        own = [f"model.path={base}", f"run.dir={folder}", "cluster.address=auto", f"cluster.npus={cards}"]
        return [sys.executable, "scripts/train.py", *own, *SMALL, *overrides]
