"""A call that is begun is made once, and its result or error is the caller's when it asks."""

import multiprocessing
import os
import threading

import pytest

from stalesync.process import in_flight
from tests.machine import patience


def test_a_call_runs_beside_the_caller_who_receives_its_result_or_its_error():
    go_on, here = threading.Event(), threading.get_ident()

    def call(value, *, other):
        assert go_on.wait(patience(10)) and threading.get_ident() != here
        if other is None:
            raise KeyError(value)
        return value + other

    sums, raises = in_flight.begin(call, 1, other=2), in_flight.begin(call, "x", other=None)
    assert not sums.done() and all(one.daemon for one in threading.enumerate() if one.name == "in flight")
    go_on.set()
    assert sums.result(patience(10)) == 3
    with pytest.raises(KeyError, match="x"):
        raises.result(patience(10))


def test_calls_one_after_the_other_share_a_thread():
    threads = {in_flight.begin(threading.get_ident).result(patience(10)) for _ in range(50)}
    assert len(threads) == 1 and threads != {threading.get_ident()}


def test_a_forked_process_has_threads_of_its_own():
    in_flight.begin(int).result(patience(10))
    process = multiprocessing.get_context("fork").Process(target=_exit_with_result)
    process.start()
    process.join(patience(20))
    assert process.exitcode == 7


def _exit_with_result():
    os._exit(in_flight.begin(int, "7").result(5))
