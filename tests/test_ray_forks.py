"""Workers of a Ray that tests start are forked, and end as workers do."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from tests import machine
from tests.harness.ray_forks import CLIENT
from tests.machine import wait_for
from tests.warm import use_ray


@ray.remote(num_cpus=0)
class Process:
    def imported(self, name):
        return name in sys.modules, os.getpid()


def _gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_worker_has_torch_from_its_first_line_on_and_its_death_is_noticed():
    use_ray()
    process = Process.remote()
    imported, pid = ray.get(process.imported.remote("torch"))
    assert imported, "it was not forked"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(process.imported.remote("torch"))


def test_a_session_ends_with_its_process_that_has_not_imported_torch():
    code = "import sys; from tests.warm import launcher; launcher().session(); assert 'torch' not in sys.modules"
    assert machine.run([sys.executable, "-c", code], 120).stderr == ""


def test_a_worker_ends_with_its_actor():
    use_ray()
    process = Process.remote()
    _, pid = ray.get(process.imported.remote("torch"))
    ray.kill(process)
    wait_for(lambda: _gone(pid), 20)


SERVER = """
import sys
from pathlib import Path
from tests.harness.ray_forks import _start
pipe = _start(Path(sys.argv[1]), ())
print(flush=True)
sys.stdin.read()
"""


def test_a_server_of_forks_survives_clients_that_are_killed(tmp_path):
    script, path = tmp_path / "default_worker.py", str(tmp_path / "server")
    script.write_text("import sys, time\ntime.sleep(float(sys.argv[1]))\nsys.exit(7)\n")
    client = [sys.executable, "-c", CLIENT, path, str(script)]
    command = [sys.executable, "-c", SERVER, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        for sent in (b"", b"\0\0", (100).to_bytes(4, "little") + b"[[]"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                connection.sendall(sent)
        for delay_s in [0.0, 0.05] * 4:  # killed before, while and after its fork ends
            with subprocess.Popen([*client, str(delay_s)]) as killed:
                time.sleep(0.05 + delay_s)
                killed.kill()
        assert subprocess.run([*client, "0"]).returncode == 7
