"""When a run evaluates, and which checkpoint is the best: pure decisions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalesync.evaluation import EvalConfig, EvalHistory, FileResult
from stalesync.evaluation.config import goals
from stalesync.evaluation.estimates import Estimate

MEAN, LENGTH = "val-core/math500/reward/mean@2", "val-aux/math500/response_length/mean@2"


def result(step, value, file="math500", digest="d"):
    estimates = {"reward/mean@2": Estimate(value, value - 1, value + 1), "response_length/mean@2": Estimate(value)}
    return FileResult(step, file, "math", digest, prompts=3, samples=2, failed=1, estimates=estimates)


def history(every=0, best=None):
    config = EvalConfig(every=every, best=best, samples=2, files=["math500.jsonl"])
    return EvalHistory(config, config.check_best(held_out=False))


def evaluate(decides, last, value_of, start=0):
    """Evaluates as a run does; returns the steps."""
    steps = []
    for step in range(start, last + 1):
        if decides.due(step, last):
            steps.append(step)
            decides.add([result(step, value_of(step)), result(step, -value_of(step), file="other")])
    return steps


@given(every=st.integers(0, 5), last=st.integers(1, 20))
def test_an_evaluation_is_due_before_the_first_step_every_so_many_steps_and_after_the_last(every, last):
    expected = {0, last} | {step for step in range(1, last) if every and step % every == 0}
    assert evaluate(history(every), last, float) == sorted(expected)


@given(
    values=st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=2, max_size=12),
    best=st.sampled_from([None, MEAN, LENGTH]),
    cut=st.integers(1, 11),
    lost=st.sets(st.integers(1, 11)),
)
def test_the_best_step_is_the_first_extreme_after_a_step_also_after_a_resume(values, best, cut, lost):
    last = len(values) - 1
    straight = history(every=1, best=best)
    steps = evaluate(straight, last, values.__getitem__)
    choose = {None: None, MEAN: max, LENGTH: min}[best]
    extreme = choose(values[1:]) if choose else None
    assert straight.best == (None if extreme is None else (values.index(extreme, 1), extreme))

    cut = min(cut, last)
    before = history(every=1, best=best)
    evaluate(before, cut, values.__getitem__)
    rows = json.loads(json.dumps([one.row() for one in before.results]))
    resumed = history(every=1, best=best)
    resumed.restore(rows, {"math500": "d"}, saved=range(1, cut + 1))
    assert resumed.results == before.results and resumed.best == before.best
    assert evaluate(resumed, last, values.__getitem__, start=cut) == steps[cut + 1 :]
    assert resumed.best == straight.best and resumed.results == straight.results

    without = history(every=1, best=best)
    without.restore(rows, {}, saved={*range(1, cut + 1)} - lost)
    kept = [value for step, value in enumerate(values[: cut + 1]) if step and step not in lost]
    assert (without.best or (0, None))[1] == (choose(kept) if choose and kept else None)


def test_a_file_that_has_changed_is_refused_by_name_and_another_one_may_be_added():
    rows = [result(3, 0.5).row()]
    history().restore(rows, {"new": "x"}, saved=[])
    with pytest.raises(ValueError, match="cannot resume: the file 'math500' has other content .* after step 3"):
        history().restore(rows, {"math500": "other"}, saved=[])


def test_metrics_have_the_names_of_verl():
    metrics = result(3, 0.5).metrics()
    assert metrics == {
        MEAN: 0.5,
        "val-aux/math500/reward/mean@2/low": -0.5,
        "val-aux/math500/reward/mean@2/high": 1.5,
        LENGTH: 0.5,
        "val-aux/math500/reward/failed": 1.0,
    }
    by_name = goals("aime", 6)
    assert {name: goal for name, goal in by_name.items() if goal == "min"} == {
        "val-aux/aime/response_length/mean@6": "min"
    }
    assert [name for name in by_name if name.startswith("val-core/")] == [
        "val-core/aime/reward/mean@6",
        "val-core/aime/reward/pass@6",
    ]
    assert [name for name in by_name if "val-aux/aime/reward" in name] == [
        f"val-aux/aime/reward/pass@{k}" for k in (1, 2, 4)
    ]
