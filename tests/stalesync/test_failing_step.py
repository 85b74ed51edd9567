"""What a step that fails leaves behind: its samples and the row of the last step, or else the error that ended it."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from fusion.rewards import RewardOutcome
from fusion.rollout import RequestBuffer
from fusion.telemetry import Metrics
from fusion.telemetry.page.cautions import CautionWatch
from fusion.training.interface import SKIPPED_IN_A_ROW
from stalesync.evaluation import EvalConfig, Evaluation
from stalesync.loop.controller import Controller
from stalesync.loop.sample_columns import SampleColumns
from stalesync.loop.training_run import TrainingRun
from stalesync.process.failures import GradientsNotFinite
from stalesync.process.garbage import NEW_OBJECTS, collecting_seldom
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample


class Failed(Exception):
    pass


def _raise(error):
    raise error


def test_garbage_collection_is_as_before_after_a_run():
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(Failed), collecting_seldom(1):
        assert gc.get_threshold()[0] == NEW_OBJECTS and gc.get_freeze_count() > frozen
        raise Failed
    assert gc.get_threshold() == thresholds and gc.get_freeze_count() == 0


def _run(write, cut):
    """A run of three steps with a checkpoint after the second, without its components. ``write``: of a step's row;
    ``cut``: of a checkpoint."""
    run = object.__new__(TrainingRun)
    run.config = SimpleNamespace(run=SimpleNamespace(steps=3, save_every="2", profile_steps=[]))
    run.max_samples = 1
    run.step, run._closing, run._closed, run._logged, run._figures = 0, 0, 0, 0, {}
    run.evaluation = Evaluation(EvalConfig(), files=[])
    run.view = SimpleNamespace(begin=lambda: None, update=lambda *_: None, note=lambda line: None)
    run.step_metrics = SimpleNamespace(begin_first_step=lambda: None)
    run.caution_watch = CautionWatch()
    run.pace = SimpleNamespace(count=lambda metrics: None)
    run.saver = SimpleNamespace(metrics=dict, writing=False)
    run.folder = SimpleNamespace(log=lambda step, figures: write(step), repeat=lambda before_first: None)
    run.loop = SimpleNamespace(
        train_step=lambda *_, **__: None, begin_close=lambda: None, end_close=dict, take_metrics=dict
    )
    run.cut = cut
    return run


@pytest.mark.parametrize("fails", ["step", "cut"])
@pytest.mark.parametrize("is_full", [False, True])
def test_a_row_that_cannot_be_written_does_not_hide_why_the_run_failed(fails, is_full, caplog):
    rows = []

    def write(step):
        rows.append(step)
        if is_full:
            raise OSError(28, "No space left on device")

    def train_step(step, close_last, log_last):
        if fails == "step" and step == 2:
            raise Failed

    run = _run(write, cut=lambda: _raise(Failed))
    run.loop.train_step = train_step
    if fails == "cut":
        run._closing, run._closed, run._logged, run.step = 1, 1, 1, 1
    with pytest.raises(Failed):
        run.run()
    assert rows == [1 if fails == "step" else 2]
    assert ("No space left on device" in caplog.text) == is_full


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
def test_the_samples_of_a_step_that_fails_are_logged_once(began, is_full, caplog):
    logged = []

    def log_samples(step, samples, describe):
        logged.append((step, samples))
        if is_full and not began:
            raise OSError(28, "No space left on device")

    def train(groups, samples, version, metrics, meanwhile, update):
        if began:
            meanwhile()
        raise Failed

    sample = Sample("g/0", Prompt("g", (3, 4), "1+1=", "2"), "2", 2, 1)
    sample.outcome = RewardOutcome(1.0)
    controller = object.__new__(Controller)
    controller.config = SimpleNamespace(rollout=SimpleNamespace(max_response_length=8))
    controller.desk = SimpleNamespace(share=SimpleNamespace(engines=(0,)))
    controller.step_metrics = SimpleNamespace(metrics=Metrics())
    controller.admission = SimpleNamespace(
        ledger=SimpleNamespace(version=0), buffer=RequestBuffer(), take_lent_s=lambda: 0.0
    )
    controller.groups = SimpleNamespace(step=5, take=lambda trained: (SampleColumns.of([sample]),) * 2)
    controller.cards = SimpleNamespace(polling=lambda poll: nullcontext())
    controller.updater = SimpleNamespace(train=train)
    controller.folder = SimpleNamespace(log_samples=log_samples)
    with pytest.raises(Failed):
        controller.train(["g"])
    assert logged == [(5, [sample])]
    assert ("No space left on device" in caplog.text) == (is_full and not began)


def test_updates_that_are_skipped_end_the_run_by_name_only_after_three_in_a_row():
    rows, skipped = [], iter([1, 2, 0, 1, 2, 3])
    run = _run(rows.append, cut=dict)
    run.config.run.steps, run.config.run.save_every = 9, "0"
    run.loop.train_step = lambda *_, log_last, **__: log_last()
    run.loop.end_close = lambda: {SKIPPED_IN_A_ROW: next(skipped)}
    with pytest.raises(GradientsNotFinite, match="3 updates in a row were skipped up to step 6, .*training.lr"):
        run.run()
    assert rows == [1, 2, 3, 4, 5, 6], "the row of the last step is logged"
