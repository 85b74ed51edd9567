"""A call that is begun is made once, and its result or error is the caller's when it asks."""

import threading

import pytest

from stalesync import in_flight
from tests.machine import patience


def test_a_call_runs_beside_the_caller_who_receives_its_result_or_its_error():
    go_on, here = threading.Event(), threading.get_ident()

    def call(value, *, other):
        assert go_on.wait(patience(10)) and threading.get_ident() != here
        if other is None:
            raise KeyError(value)
        return value + other

    sums, raises = in_flight.begin(call, 1, other=2), in_flight.begin(call, "x", other=None)
    assert not sums.done() and all(one.daemon for one in threading.enumerate() if one.name == "in flight: call")
    go_on.set()
    assert sums.result(patience(10)) == 3
    with pytest.raises(KeyError, match="x"):
        raises.result(patience(10))
