"""The life of a step: closed once, logged once, also where its run fails."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalesync.loop.step import Step
from tests.stalesync.loop.fakes import Rows

CALLS = ("begin_close", "close", "log", "log_after_failure")


@given(st.lists(st.sampled_from(CALLS), max_size=8))
def test_each_transition_is_made_once_in_order(calls):
    order = []
    step = Step(3, Rows(order))
    for call in calls:
        getattr(step, call)()
    assert order == ["close", "log 3"][: len(order)]
    assert ("log 3" in order) == any("log" in call for call in calls) == (step.state == "logged")


def test_a_step_that_was_logged_before_is_not_logged_again():
    order = []
    step = Step(0, Rows(order), logged=True)
    for call in CALLS:
        getattr(step, call)()
    assert order == []


def test_the_row_of_a_closed_step_has_the_figures_of_the_queue():
    rows = []

    class Counting(Rows):
        def figures(self):
            return {"a": 1.0}

        def acknowledge(self):
            return {"queue": 2.0}

        def log(self, number, metrics):
            rows.append(metrics)

    Step(1, Counting([])).log()
    Step(2, Counting([])).log_after_failure()
    assert rows == [{"a": 1.0, "queue": 2.0}, {"a": 1.0}], "the queue may have ended with the run"


def test_a_step_whose_run_fails_while_it_closes_has_the_figures_from_before():
    rows, figures = [], iter([{"a": 1.0}, {"a": 2.0}])

    class Changing(Rows):
        def figures(self):
            return next(figures)

        def log(self, number, metrics):
            rows.append(metrics)

    step = Step(1, Changing([]))
    step.begin_close()
    step.log_after_failure()
    assert rows == [{"a": 1.0}]


class Full(Rows):
    def log(self, number, metrics):
        super().log(number, metrics)
        raise OSError(28, "No space left on device")


def test_a_row_that_cannot_be_written_is_tried_once(caplog):
    order = []
    step = Step(1, Full(order))
    with pytest.raises(OSError, match="No space"):
        step.log()
    step.log_after_failure()
    assert order == ["close", "log 1"] and not caplog.messages
    Step(2, Full(order)).log_after_failure()
    assert "No space left on device" in caplog.text
