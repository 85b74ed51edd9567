"""Signals that end a run are reported as such, also where Ray replaces the handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from stalesync.process import stopping
from stalesync.process.stopping import (
    SIGNALS,
    STOP_SIGNALS,
    Stopped,
    acknowledging,
    completing,
    describe_stop,
    exit_status,
    holding,
    ignore_stops,
    keeping_handlers,
    notes_of_request,
    raise_in_main,
    requested_stop,
    stoppable,
)
from tests.machine import patience, run


@pytest.fixture(autouse=True)
def _default_handlers():
    """Also where the tests themselves run under nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
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
            signal.raise_signal(signal.SIGTERM)  # to this thread: another one may receive that of `kill` later
        with pytest.raises(Stopped), keeping_handlers():
            of_ray(signal.SIGTERM, None)  # received by another thread
        with pytest.raises(SystemExit, match="7"), keeping_handlers():
            raise SystemExit(7)


ENDING = """
import os, signal
from stalesync.process.stopping import Stopped, keeping_handlers, stoppable

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


SHUTTING_DOWN = """
import os, signal, threading
import ray
from stalesync.process.ray_cluster import _shutting_down
from stalesync.process.stopping import Stopped, stoppable

class Node:
    def kill_all_processes(self):
        os.kill(os.getpid(), signal.SIGTERM)  # another thread receives it
        threading.Event().wait(0.05)

def shutdown():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as the C++ of Ray does
    ray._private.worker._global_node.kill_all_processes()
    print("shut down", flush=True)

ray._private.worker._global_node, ray.shutdown = Node(), shutdown
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    with stoppable(), _shutting_down():
        pass
except Stopped as stop:
    print(stop.signal.name)
"""


def test_a_signal_waits_for_the_end_of_ray_also_where_another_thread_receives_it():
    ended = subprocess.run([sys.executable, "-c", SHUTTING_DOWN], stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == (0, "shut down\nSIGTERM\n")


def test_a_process_that_is_started_meanwhile_can_be_ended_by_the_signal():
    report = [sys.executable, "-c", "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()))"]
    with stoppable(), keeping_handlers():
        # As Ray starts its daemons: only with a `preexec_fn` are hooks called in the child.
        blocked = subprocess.run(report, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: None).stdout
    assert "SIG" not in blocked.upper().replace("SIGINT", ""), blocked


LEAVING = """
import os, signal, sys
from stalesync.process.stopping import ignore_stops, leave_at_stops, stoppable

leave_at_stops()
number = signal.Signals[sys.argv[1]]
if sys.argv[2] == "ended":
    with stoppable():
        ignore_stops()
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    ignore_stops()
os.kill(os.getpid(), number)
print("goes on", flush=True)
"""


def _leave(number, phase):
    command = [sys.executable, "-c", LEAVING, number.name, phase]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (signal.SIGINT, 130, "stopped by Ctrl-C"),
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
        (signal.SIGHUP, 129, "stopped by SIGHUP"),
    ],
)
def test_a_process_that_has_started_nothing_ends_at_once_with_a_message(number, status, message):
    left = _leave(number, "starts")
    assert (left.returncode, left.stdout, left.stderr) == (status, "", f"{message}\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_that_has_stated_how_it_ended_ends_so(number):
    left = _leave(number, "ended")
    assert (left.returncode, left.stdout, left.stderr) == (0, "goes on\n", "")


def test_the_handlers_are_those_before_after_a_run_in_the_same_process():
    before = [signal.getsignal(number) for number in SIGNALS]
    with stoppable():
        ignore_stops()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(KeyboardInterrupt), stoppable():
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_held_is_raised_at_the_end(number):
    with pytest.raises(KeyboardInterrupt) as caught, stoppable():
        with holding():
            os.kill(os.getpid(), number)
            held = True
        raise AssertionError("goes on")
    assert held and exit_status(caught.value) == 128 + number


HELD = """
import os, signal, sys, threading, time
from stalesync.process import stopping

stopping.HOLD_S = 0.05

def watch():
    while (stop := stopping.held_too_long()) is None:
        time.sleep(0.01)
    stopping.leave(stop)

with stopping.stoppable(), stopping.keeping_handlers():
    threading.Thread(target=watch).start()
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    time.sleep(600)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_thread_ends_what_holds_a_signal_for_too_long(number, status):
    # In a process of its own, none of whose threads receives the signal.
    ended = run([sys.executable, "-c", HELD, number.name], 60)
    assert ended.returncode == status


def test_a_signal_that_python_drops_is_raised_again(monkeypatch):
    monkeypatch.setattr(stopping, "RAISE_AGAIN_S", 0.05)
    with pytest.raises(Stopped), stoppable(), acknowledging():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:  # as an import or a destructor does
            pass
        time.sleep(patience(20))
        raise AssertionError("ignored")


def test_a_second_signal_does_not_interrupt_what_the_first_one_ends(monkeypatch):
    monkeypatch.setattr(stopping, "RAISE_AGAIN_S", 0.01)
    monkeypatch.setattr(stopping, "FORCE_S", patience(60))
    cleaned = []
    with pytest.raises(Stopped), stoppable():
        try:
            with acknowledging():
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            cleaned.append(True)
    assert cleaned


FORCED = """
import os, signal, time
from stalesync.process import stopping

stopping.FORCE_S = 0.05
with stopping.stoppable():
    try:
        with stopping.acknowledging():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        print("hangs", flush=True)
"""


def test_a_signal_that_comes_later_ends_what_hangs_at_once():
    ended = subprocess.run([sys.executable, "-c", FORCED], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "", "stopped by SIGTERM\n")


def test_another_thread_interrupts_the_main_thread_where_it_waits():
    with pytest.raises(LookupError, match="it has ended"), stoppable(), acknowledging():
        threading.Timer(0.05, raise_in_main, [LookupError("it has ended")]).start()
        time.sleep(patience(20))
    raise_in_main(LookupError("outside it changes nothing"))


def test_a_signal_that_a_call_of_ray_raises_as_another_exception_is_still_that_signal():
    with pytest.raises(Stopped) as caught, stoppable(), acknowledging():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None
    assert describe_stop(caught.value) == "stopped by SIGTERM"


def test_the_first_sigterm_is_a_request_where_the_block_completes_what_it_does(monkeypatch, capfd):
    with stoppable():
        with completing():
            assert requested_stop() is None and notes_of_request() == []
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # as of a shell and of a scheduler, both of which pass it on
            time.sleep(0.01)
            assert describe_stop(requested_stop()) == "stopped by SIGTERM"
        assert notes_of_request() == ["SIGTERM arrived when the last step had begun: the run was completed"]
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(patience(5))
    assert capfd.readouterr().err.count("SIGTERM: the step under way ends") == 1


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt), (signal.SIGHUP, Stopped)]
)
def test_a_later_signal_is_raised_where_the_first_one_was_a_request(monkeypatch, number, raised):
    monkeypatch.setattr(stopping, "FORCE_S", 0.05)
    with pytest.raises(raised), stoppable(), acknowledging(), completing():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert requested_stop() is not None
        os.kill(os.getpid(), number)
        time.sleep(patience(5))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_only_sigterm_is_a_request(number):
    with pytest.raises(KeyboardInterrupt), stoppable(), acknowledging(), completing():
        os.kill(os.getpid(), number)
        time.sleep(patience(5))
