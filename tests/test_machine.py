"""Deadlines that stretch with the machine: never shorter than stated, longer where it is slow or crowded."""

import sys
from subprocess import TimeoutExpired

import pytest

from tests import machine
from tests.machine import MAX_STRETCH, Deadline, Machine, Speed


def machine_of(*speeds: Speed, load: float = 0.0) -> Machine:
    left = list(speeds)
    return Machine(lambda: left.pop(0), lambda: load)


def test_a_deadline_is_never_shorter_than_stated():
    assert machine_of(Speed(0.3, 0.9)).patience(10) == 10
    assert machine_of(Speed(0.3, 0.9)).cpu_patience(10) == 10


def test_a_slow_machine_and_a_crowded_one_stretch_it():
    assert machine_of(Speed(3.0, 1.0)).patience(10) == 30
    assert machine_of(Speed(1.0, 2.5)).patience(10) == 25
    assert machine_of(Speed(1.0, 2.5), load=4.0).patience(10) == 40, "the larger of what the loop and the system say"
    assert machine_of(Speed(3.0, 2.0)).patience(10) == 60
    assert machine_of(Speed(3.0, 2.0)).cpu_patience(10) == 30, "CPU time does not grow with the load"
    assert machine_of(Speed(90.0, 90.0)).patience(10) == 10 * MAX_STRETCH


def test_load_that_comes_later_is_measured_before_anything_is_late():
    asked = machine_of(Speed(1.0, 1.0), Speed(1.0, 3.0))
    assert asked.within(10, 10), "without a second measurement"
    assert asked.within(25, 10), "now it is crowded"
    late = machine_of(Speed(1.0, 1.0), Speed(1.0, 1.0))
    assert not late.within(11, 10)


def test_slowness_does_not_fall_below_that_of_the_start():
    asked = machine_of(Speed(2.0, 1.0), Speed(1.0, 1.0))
    assert not asked.within(21, 10)
    assert asked.patience(10) == 20


def test_a_wait_ends_when_the_machine_is_as_it_was():
    now = [100.0]
    deadline = Deadline(10, machine_of(Speed(1.0, 1.0), Speed(1.0, 2.0), Speed(1.0, 1.0)), lambda: now[0])
    assert deadline.left_s() == 10 and not deadline.expired()
    now[0] = 115.0
    assert not deadline.expired() and deadline.left_s() == 5, "twice as crowded as it was"
    now[0] = 121.0
    assert deadline.expired() and deadline.left_s() == 0


def test_the_loop_is_measured_on_this_machine():
    speed = Speed.measure(0.05)
    assert 0.05 < speed.slowness < 50 and 0.9 < speed.crowding < 100


def test_what_is_reached_is_returned_and_what_is_not_is_a_timeout():
    answers = iter([0, None, "there"])
    assert machine.wait_for(lambda: next(answers), 60, every_s=0) == "there"
    with pytest.raises(TimeoutError, match="not reached in 0.01 s of the reference machine"):
        machine.wait_for(lambda: False, 0.01, every_s=0)


def test_a_subprocess_answers_or_is_ended():
    done = machine.run([sys.executable, "-S", "-c", "import sys; print(7); sys.exit(3)"], 60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "7\n", "")
    with pytest.raises(TimeoutExpired):
        machine.run([sys.executable, "-S", "-c", "import time; time.sleep(600)"], 0.01)
