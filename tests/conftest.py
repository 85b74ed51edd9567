"""What every process that runs tests has for itself, so that several may run side by side."""

import atexit
import gc
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

from tests.machine import MACHINE

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Seconds that Ray gives its own processes to start, also in the runs that tests start: a busy machine needs more than
# the 30 or 60 of its defaults.
for name in ("raylet_start_wait_time_s", "gcs_server_port_wait_time_s", "gcs_server_request_timeout_seconds",
             "worker_register_timeout_seconds"):  # fmt: skip
    os.environ.setdefault(f"RAY_{name}", "300")
os.environ.setdefault("RAY_agent_register_timeout_ms", "300000")

# Ray notes here which cluster was started last, and what asks for "auto" joins that one.
os.environ.pop("RAY_ADDRESS", None)
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rl-", dir="/tmp")  # short: there are sockets below it
atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)

# How long an example takes is not what property tests ask, and no machine is too slow to draw one.
settings.register_profile("suite", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported is no garbage: looking for some in it takes longer than many tests


def pytest_report_header(config: pytest.Config) -> str:
    speed = MACHINE.speed
    return f"machine: computes {speed.slowness:.1f} x as long as the reference, {speed.crowding:.1f} x as crowded"
