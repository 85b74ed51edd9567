"""Workers of a Ray that tests start are forked, and end as workers do."""

import os
import signal
import sys
from pathlib import Path

import pytest
import ray

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


def test_a_worker_ends_with_its_actor():
    use_ray()
    process = Process.remote()
    _, pid = ray.get(process.imported.remote("torch"))
    ray.kill(process)
    wait_for(lambda: _gone(pid), 20)
