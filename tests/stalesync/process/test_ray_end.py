"""A run whose main thread waits in Ray ends at once from another thread, with its message and its report."""

import re
import signal
import subprocess
import sys

import pytest

from tests.machine import communicate, run

START = """
import os, signal, sys, time
from pathlib import Path
from stalesync.process import stopping
from stalesync.process.failures import RayEnded
from stalesync.process.ray_cluster import Ender
from stalesync.process.ray_guard import GIVING_UP, Guard
from stalesync.process.stopping import keeping_handlers, stoppable

def report(error, stderr):
    os.write(stderr, f"error: {error}".encode())

def show_report(outcome):
    print(outcome, os.read(told, 1) == GIVING_UP, flush=True)

told, pipe = os.pipe()
ender = Ender(Guard("mark", pipe, Path("ray"), ends_itself=True), report, show_report)
"""

GIVE_UP = """
ender.give_up(RayEnded("gcs_server"))
"""

HOLD = """
stopping.HOLD_S = 0.1
with stoppable(), keeping_handlers(), ender.watching_start():
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    time.sleep(600)
"""


def _run(script, *arguments):
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", START + script, *arguments], **pipes, text=True) as process:
        out, err = communicate(process, 60)
    return process.returncode, out, err


def test_the_end_of_a_process_of_ray_ends_the_run_with_its_report():
    status, out, err = _run(GIVE_UP)
    assert (status, out) == (1, "failed True\n") and err.startswith("error: Ray's process gcs_server has ended")


@pytest.mark.parametrize(
    ("number", "status", "outcome"),
    [(signal.SIGINT, 130, "stopped by Ctrl-C"), (signal.SIGTERM, 143, "stopped by SIGTERM")],
)
def test_a_signal_ends_a_run_whose_ray_takes_too_long_to_start(number, status, outcome):
    assert _run(HOLD, number.name) == (status, f"{outcome} True\n", f"{outcome}\n")


JOIN = """
import os, threading
from stalesync.process.ray_cluster import ray_cluster
from stalesync.process.stopping import stoppable
import ray

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": 64 * "x"}
with stoppable():
    threading.Timer(0.5, os.kill, [os.getpid(), 15]).start()
    with ray_cluster("127.0.0.1:9", show_report=lambda outcome: print(outcome, flush=True)):
        pass
"""


def test_a_signal_ends_a_run_that_waits_for_a_cluster_to_answer():
    process = subprocess.run([sys.executable, "-c", JOIN], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (143, "stopped by SIGTERM\n"), process.stderr
    assert process.stderr.endswith("stopped by SIGTERM\n")


SHUT_DOWN = """
import os
from stalesync.process.ray_cluster import ray_cluster
from stalesync.process.stopping import Stopped, stoppable

with stoppable():
    with ray_cluster(None):
        pass
    try:
        os.kill(os.getpid(), 15)
    except Stopped:
        print("stopped")
"""


def test_a_signal_is_raised_also_after_ray_was_shut_down():
    """Ray's C++ gives SIGTERM its default effect: the process would end without a message."""
    process = run([sys.executable, "-c", SHUT_DOWN], 120)
    assert (process.returncode, process.stdout) == (0, "stopped\n"), process.stderr


WAIT = """
from stalesync.process import ray_cluster
ray_cluster.WARN_EVERY_S = 0.2
with ender.watching_start():
    time.sleep(1)
"""


def test_a_start_that_takes_long_says_so():
    status, _, err = _run(WAIT)
    assert status == 0 and re.match(r"waiting for Ray to start, or for its cluster to answer: \d s\n", err)


NO_LOOPBACK = """
import sys
from stalesync.process.failures import RunFailed
from stalesync.process.ray_cluster import check_loopback
try:
    check_loopback()
except RunFailed as error:
    sys.exit(str(error))
"""


def test_a_host_that_does_not_reach_itself_is_refused_before_ray_waits_for_it():
    if subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not create a network")
    own, alone = (run([*ahead, sys.executable, "-c", NO_LOOPBACK], 60) for ahead in ([], ["unshare", "--net"]))
    assert own.returncode == 0, own.stderr
    assert alone.stderr.startswith("this host does not reach itself at 127.0.0.1 ([Errno 101] Network is unreachable)")
