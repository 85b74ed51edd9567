"""A signal ends a run at any moment of its start: within seconds, with a message, and nothing is left."""

import signal
import time

import pytest

from stalesync.process.ray_guard import FROZEN_STOP_S
from tests.machine import communicate, within
from tests.stalesync.runs import assert_gone, begin, descendants, wait_until


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "moment_s",
    [
        0.3,  # while Ray starts
        *(pytest.param(moment_s, marks=pytest.mark.extended) for moment_s in (0.0, 0.6, 1.2, 2.0, 3.0)),
    ],
)
def test_a_signal_ends_a_run_that_starts(base, tmp_path, moment_s, number):
    run = begin(base, tmp_path)
    wait_until(run, 60, (tmp_path / "run" / "config.yaml").exists)
    time.sleep(moment_s)
    below, start_s = descendants(run.pid), time.monotonic()
    run.send_signal(number)
    out, err = communicate(run, 60)
    took_s = time.monotonic() - start_s
    assert within(took_s, 12)
    message = "stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {number.name}"
    ended = [(128 + number, True, True, False)]
    if took_s > FROZEN_STOP_S:  # Ray's start may have held the interpreter so long: the guard reports, and kills it
        ended.append((-signal.SIGKILL, False, True, False))
    assert (run.returncode, message in out, message in err, "Traceback" in err) in ended, err
    assert_gone(below)
