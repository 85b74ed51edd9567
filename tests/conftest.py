"""What every process that runs tests has for itself, so that several may run side by side."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.detection import is_hypothesis_test

from tests.arrangement import arranged, kind_of
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

EXAMPLES = 25
"""Number of examples of a property in the default run. `-m extended` runs those that ask for more with all of them"""


ELSEWHERE = {"slow", "npu", "gpu", "vllm", "megatron", "contracts", "triton", "browser", "loggers"}
"""Markers of tests that need more than CI's extended run has"""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    _bound_examples(config, items)
    yield  # others leave out what was not asked for
    if (processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        items[:] = arranged(items, [kind_of(item) for item in items], processes)


def _bound_examples(config: pytest.Config, items: list[pytest.Item]) -> None:
    extended = config.option.markexpr == "extended"
    for item in items:
        test = getattr(item, "obj", None)
        holder, name = _settings_of(test) if is_hypothesis_test(test) else (None, "")
        if holder is not None and (own := getattr(holder, name)).max_examples > EXAMPLES:
            if not extended:
                setattr(holder, name, settings(own, max_examples=EXAMPLES))
            elif not ELSEWHERE & {mark.name for mark in item.iter_markers()}:
                item.add_marker("extended")


def _settings_of(test: Any) -> tuple[Any, str]:
    """Return where the settings of a property are: with its function, or with the class of its state machine."""
    machine = getattr(test, "__self__", None)
    if machine is not None and hasattr(type(machine), "settings"):
        return type(machine), "settings"
    return getattr(test, "__func__", test), "_hypothesis_internal_use_settings"


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IGNORED = [number for number in STOPS if signal.getsignal(number) is signal.SIG_IGN]
"""Signals that already this process's parent ignores, as `nohup` does"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let no test leave a signal ignored or blocked: processes that later tests start would inherit it."""
    result = yield
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*STOPS}
    ignored = [number for number in STOPS if signal.getsignal(number) is signal.SIG_IGN and number not in IGNORED]
    if blocked or ignored:
        warnings.warn(f"{item.nodeid} left signals: ignored {ignored}, blocked {blocked}", stacklevel=1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        for number in ignored:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Look for no garbage in what is imported, neither meanwhile, which takes a fifth longer, nor in later tests."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_report_header(config: pytest.Config) -> str:
    speed = MACHINE.speed
    return f"machine: computes {speed.slowness:.1f} x as long as the reference, {speed.crowding:.1f} x as crowded"
