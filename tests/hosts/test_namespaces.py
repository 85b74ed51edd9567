"""The hosts that the tests of this folder use: apart from each other, and gone whatever ends the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.hosts.namespaces import ROOT, Hosts, why_not
from tests.machine import wait_for

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

LOOK = """
hostname; hostname -i; (ls /dev/shm; ls /tmp/apart) 2>/dev/null | wc -l; touch /dev/shm/mine; mkdir /tmp/apart
python - <<'PYTHON'
import socket
print(socket.gethostbyname("host-a"), socket.gethostbyname("host-b"))
PYTHON
"""

PING = "import socket, sys; socket.create_connection((sys.argv[1], 7001), 2).close()"
SERVE = "import socket; s = socket.create_server(('', 7001)); print('up', flush=True); [s.accept() for _ in range(99)]"


def _reaches(hosts, name, address):
    return hosts.run(name, [sys.executable, "-c", PING, address]).returncode == 0


def test_hosts_have_their_own_names_addresses_memory_and_links(tmp_path):
    (tmp_path / "shared").touch()
    with Hosts(2, tmp_path, own=(tmp_path / "own",)) as hosts:
        told = [hosts.run(name, ["bash", "-c", LOOK]).stdout.split() for name in hosts.names]
        assert told == [
            ["host-a", "127.0.1.1", "0", "127.0.1.1", "10.73.0.2"],
            ["host-b", "127.0.1.1", "0", "10.73.0.1", "127.0.1.1"],
        ]
        for name in hosts.names:
            assert hosts.run(name, ["ls", str(tmp_path / "shared"), str(ROOT / "setup.py")]).returncode == 0
            assert hosts.run(name, ["touch", str(tmp_path / "own" / name)]).returncode == 0
        assert not list((tmp_path / "own").iterdir())
        serves = hosts.start("host-a", [sys.executable, "-c", SERVE])
        assert serves.stdout.readline() == "up\n"
        assert _reaches(hosts, "host-b", "10.73.0.1")
        hosts.cut("host-b")
        assert not _reaches(hosts, "host-b", "10.73.0.1")
        hosts.mend("host-b")
        wait_for(lambda: _reaches(hosts, "host-b", "10.73.0.1"), 20)  # its neighbour must be found again
        hosts.slow("host-b", 1000)
        assert _reaches(hosts, "host-b", "10.73.0.1")
        ssh = [str(hosts.ssh(tmp_path / "bin") / "ssh"), "-o", "BatchMode=yes", "host-b", "bash"]
        assert subprocess.run(ssh, input="hostname", capture_output=True, text=True).stdout == "host-b\n"
        assert any("7001" in line for line in hosts.processes("host-a")) and not hosts.processes("host-b")
        hosts.kill("host-a")
        assert serves.wait() != 0
        assert not _reaches(hosts, "host-b", "10.73.0.1")
    assert not list(tmp_path.glob(".hosts-*"))


HOLD = """
import sys, time
from pathlib import Path
from tests.hosts.namespaces import Hosts
hosts = Hosts(1, Path(sys.argv[1]))
hosts.start("host-a", ["sleep", "4711"], stdout=None)
print(hosts.pid("host-a"), hosts.pid("switch"), flush=True)
time.sleep(600)
"""


def test_hosts_end_with_the_process_that_made_them_even_if_it_is_killed(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        pids = list(map(int, holder.stdout.readline().split()))
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 5)
