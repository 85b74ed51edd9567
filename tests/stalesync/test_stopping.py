"""Signals that end a run are reported as such, also where Ray replaces the handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from stalesync.stopping import STOP_SIGNALS, Stopped, describe_stop, exit_status, keeping_handlers, stoppable


@pytest.fixture(autouse=True)
def _default_handlers():
    """Also where the tests themselves run under nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_raised_as_what_it_is(number, status):
    with pytest.raises(KeyboardInterrupt) as caught, stoppable():
        os.kill(os.getpid(), number)
    assert describe_stop(caught.value) == f"stopped by {number.name}" and exit_status(caught.value) == status
    assert signal.getsignal(number) is signal.SIG_DFL


def test_ctrl_c_is_told_apart():
    assert describe_stop(KeyboardInterrupt()) == "stopped by Ctrl-C" and exit_status(KeyboardInterrupt()) == 130


def test_a_signal_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stoppable():
        os.kill(os.getpid(), signal.SIGHUP)


def test_a_handler_that_is_replaced_in_between_comes_back():
    def of_ray(number, _):
        raise SystemExit(number)

    with stoppable():
        with keeping_handlers():
            signal.signal(signal.SIGTERM, of_ray)
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_the_other_handler_gets_counts_as_ours():
    def of_ray(number, _):
        raise SystemExit(number)

    with stoppable():
        with pytest.raises(Stopped), keeping_handlers():
            signal.signal(signal.SIGTERM, of_ray)
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped), keeping_handlers():
            of_ray(signal.SIGTERM, None)  # received by another thread
        with pytest.raises(SystemExit, match="7"), keeping_handlers():
            raise SystemExit(7)


ENDING = """
import os, signal
from stalesync.stopping import Stopped, keeping_handlers, stoppable

try:
    with stoppable(), keeping_handlers():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends the process, as that of Ray's C++ does
        os.kill(os.getpid(), signal.SIGTERM)
        print("came to its end", flush=True)
except Stopped as stop:
    print(stop.signal.name)
"""


def test_a_signal_waits_while_a_handler_in_c_would_end_the_process():
    # In a process of its own: this one may have threads, started before, that would receive the signal.
    ended = subprocess.run([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout.split("\n")) == (0, ["came to its end", "SIGTERM", ""])


def test_a_process_that_is_started_meanwhile_can_be_ended_by_the_signal():
    report = [sys.executable, "-c", "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()))"]
    with stoppable(), keeping_handlers():
        # As Ray starts its daemons: only with a `preexec_fn` are hooks called in the child.
        blocked = subprocess.run(report, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: None).stdout
    assert "SIG" not in blocked.upper().replace("SIGINT", ""), blocked
