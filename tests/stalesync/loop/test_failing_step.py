"""What a step that fails leaves behind: its samples and the row of the last step, or else the error that ended it."""

import gc

import pytest

from fusion.rewards import RewardOutcome
from fusion.training.interface import SKIPPED_IN_A_ROW
from stalesync.evaluation import EvalConfig, Evaluation
from stalesync.job.config import Config
from stalesync.loop.checkpoints import Checkpoints, Saver
from stalesync.loop.controller import Controller
from stalesync.loop.evaluator import Evaluator
from stalesync.loop.sample_columns import SampleColumns
from stalesync.loop.step import Step, StepRows
from stalesync.loop.training_run import TrainingRun
from stalesync.policy.pacing import PaceTally
from stalesync.process.failures import GradientsNotFinite
from stalesync.process.garbage import NEW_OBJECTS, collecting_seldom
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample
from tests.stalesync.loop.fakes import Cards, Folder, Groups, Rows, Source, Updater, View, make_controller


class Failed(Exception):
    pass


def test_garbage_collection_is_as_before_after_a_run():
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(Failed), collecting_seldom(1):
        assert gc.get_threshold()[0] == NEW_OBJECTS and gc.get_freeze_count() > frozen
        raise Failed
    assert gc.get_threshold() == thresholds and bool(gc.get_freeze_count()) == bool(frozen)


class Cuts(Checkpoints):
    """Checkpoints of which nothing is written. ``fails``: whether a cut does."""

    fails = False

    def cut(self):
        if self.fails:
            raise Failed
        return {}

    def save(self, state): ...


def make_run(rows, kind, steps, save_every):
    """Return a run of ``steps`` steps without cards, whose loop is a ``kind``."""
    config = Config()
    config.run.steps, config.run.save_every = steps, save_every
    loop = make_controller([], kind=kind, config=config, rows=rows)
    evaluation = Evaluation(EvalConfig(), files=[])
    return TrainingRun(
        loop=loop,
        evaluator=Evaluator(evaluation=evaluation, loop=loop),
        checkpoints=Cuts(loop=loop, evaluation=evaluation, inputs={}, saver=Saver()),
    )


class FailingRows(Rows):
    def log(self, number, metrics):
        super().log(number, metrics)
        raise OSError(28, "No space left on device")


class FailsInStep2(Controller):
    def train_step(self):
        if self.last.number == 1:
            raise Failed
        self.last = Step(self.last.number + 1, self.rows)


@pytest.mark.parametrize("fails", ["step", "cut"])
@pytest.mark.parametrize("is_full", [False, True])
def test_a_row_that_cannot_be_written_does_not_hide_why_the_run_failed(fails, is_full, caplog):
    order = []
    run = make_run((FailingRows if is_full else Rows)(order), FailsInStep2, steps=3, save_every="2")
    if fails == "cut":
        run.loop.config.run.save_every, run.checkpoints.fails = "1", True
    with pytest.raises(Failed):
        run.run()
    assert order == ["close", "log 1"]
    assert ("No space left on device" in caplog.text) == is_full


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
def test_the_samples_of_a_step_that_fails_are_logged_once(began, is_full, caplog):
    logged = []
    sample = Sample("g/0", Prompt("g", (3, 4), "1+1=", "2"), "2", 2, 1)
    sample.outcome = RewardOutcome(1.0)

    def log_samples(step, samples, describe):
        logged.append((step, samples))
        if is_full and not began:
            raise OSError(28, "No space left on device")

    class OneGroup(Groups):
        step = 5

        def take(self, trained):
            return SampleColumns.of([sample]), SampleColumns.of([sample])

    class FailingUpdater(Updater):
        def __init__(self): ...

        def begin(self, groups, samples, version, metrics, *, update):
            if not began:
                raise Failed

        def finish(self, training, metrics):
            raise Failed

    controller = make_controller([], groups=OneGroup([]), updater=FailingUpdater(), folder=Folder(log_samples))
    with pytest.raises(Failed):
        controller.train(["g"])
    assert logged == [(5, [sample])]
    assert ("No space left on device" in caplog.text) == (is_full and not began)


class Logs(Controller):
    def train_step(self):
        self.last.log()
        self.last = Step(self.last.number + 1, self.rows)


def test_updates_that_are_skipped_end_the_run_by_name_only_after_three_in_a_row():
    logged, skipped = [], iter([1, 2, 0, 1, 2, 3])

    class LoggingFolder(Folder):
        def log(self, number, metrics):
            logged.append(number)

    class SkippingRows(StepRows):
        def acknowledge(self):
            return {}

        def take_metrics(self, figures):
            return {SKIPPED_IN_A_ROW: next(skipped)}

        def figures(self):
            return {}

    rows = SkippingRows(
        cards=Cards([]),
        queue=None,
        ledger=None,
        source=Source(),
        updater=None,
        step_metrics=None,
        folder=LoggingFolder(),
        view=View(),
        pace=PaceTally(None),
        take_save_metrics=dict,
    )
    with pytest.raises(GradientsNotFinite, match="3 updates in a row were skipped up to step 6, .*training.lr"):
        make_run(rows, Logs, steps=9, save_every="0").run()
    assert logged == [1, 2, 3, 4, 5, 6], "the row of the last step is logged"
