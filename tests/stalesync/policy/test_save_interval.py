import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalesync.job.config import RunConfig
from stalesync.policy.save_interval import SaveInterval


@pytest.mark.parametrize(
    ("value", "interval"),
    [
        (0, SaveInterval()),
        ("0", SaveInterval()),
        (10, SaveInterval(steps=10)),
        ("90s", SaveInterval(seconds=90)),
        ("1.5 h", SaveInterval(seconds=5400)),
        (RunConfig().save_every, SaveInterval(seconds=1800)),
    ],
)
def test_a_number_is_of_steps_and_a_number_with_a_unit_a_time(value, interval):
    assert SaveInterval.parse(value) == interval


@pytest.mark.parametrize("value", ["", "-1", "1.5", "0min", "10 days", "s", True, None, "1e3s", "٣"])
def test_anything_else_is_refused_by_key(value):
    with pytest.raises(
        ValueError, match=r"run.save_every=.*: expected a number of steps \(10\), a time \(90s, 30min, 2h"
    ):
        RunConfig(save_every=value).validate()


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 300)), max_size=50), st.floats(1, 500))
def test_a_time_is_kept_to_within_a_step_and_the_time_of_writing_and_no_step_waits(steps, seconds):
    """``steps``: how long each takes, and how long a checkpoint begun after it takes to write."""
    interval, now, cut, written = SaveInterval(seconds=seconds), 0.0, 0.0, 0.0
    for number, (took_s, writes_s) in enumerate(steps, 1):
        now += took_s
        if interval.due(number, now - cut, writing=now < written):
            assert now >= written and now - cut >= seconds
            cut, written = now, now + writes_s
        else:
            assert now - cut < seconds or now < written


def test_steps_are_multiples_whatever_the_time_and_0_is_never():
    assert [step for step in range(1, 10) if SaveInterval(steps=3).due(step, 0.0, writing=True)] == [3, 6, 9]
    assert not SaveInterval().due(3, 1e9, writing=False)
