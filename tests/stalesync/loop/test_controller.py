"""In which order the controller obeys: what need not wait for the cards is done while they switch."""

from functools import partial

import pytest

from stalesync.loop.controller import Controller
from stalesync.loop.step import Step
from stalesync.policy.commands import AdmitGroups, AwaitSamples, Dispatch, Publish, Suspend, Train
from tests.stalesync.loop.fakes import make_controller

START, FREEING = Dispatch({0: ()}, {}, frozenset({0})), Dispatch({0: ()}, {1: ["g/0"]}, frozenset({0}))


class Noting(Controller):
    """Notes what it would await and train."""

    def await_samples(self):
        self.groups.order.append("await_samples")

    def train(self, trained, update=True):
        self.groups.order.append("train")


class Reference:
    """Notes what it is told."""

    def __init__(self, order):
        self.begin, self.settle = (partial(order.append, name) for name in ("begin", "settle"))


def _obeyed(commands, losses=0):
    """Return what is done, in order, for the commands of a step. ``losses``: how often the first engine is lost while
    weights are sent."""
    order = []
    controller = make_controller(order, commands, losses=losses, kind=Noting)
    controller.last = Step(0, controller.rows)
    controller.train_step()
    assert controller.last.number == 1 and controller.last.state == "open"
    return order


def test_engines_are_started_before_the_last_step_is_logged_and_the_switch_awaited():
    commands = [Publish(1), AdmitGroups(2), START, AwaitSamples(), Suspend((0,)), Train(("g",))]
    first = ["rejoin", "publish", "close", "admit", "dispatch", "log 0", "end_publish"]
    assert _obeyed(commands) == [*first, "await_samples", "suspend", "train"]


@pytest.mark.parametrize("command", [FREEING, AwaitSamples(), Suspend((0,)), Train(("g",))])
def test_a_command_for_cards_that_have_switched_waits_for_them(command):
    order = _obeyed([Publish(1), AdmitGroups(2), command])
    assert order[:-1] == ["rejoin", "publish", "close", "admit", "log 0", "end_publish"]


@pytest.mark.parametrize("losses", [1, 2])
def test_a_switch_in_which_an_engine_is_lost_is_repeated_with_what_was_begun_behind_it(losses):
    begun = ["rejoin", "publish", "close", "admit"]
    failed = ["end_publish", "lost", "recover [1, 2]", "rejoin", "publish"]
    assert _obeyed([Publish(1), AdmitGroups(2), START, AwaitSamples()], losses) == [
        *begun,
        "dispatch",
        "log 0",
        *[*failed, "dispatch"] * losses,
        "end_publish",
        "await_samples",
    ]
    freed = _obeyed([Publish(1), AdmitGroups(2), FREEING, AwaitSamples()], losses)
    assert freed == [*begun, "log 0", *failed * losses, "end_publish", "dispatch", "await_samples"]


def test_engines_that_cannot_receive_weights_while_they_generate_are_stopped():
    assert _obeyed([Publish(1, overlapped=(1,)), START], losses=1) == [
        *("send", "close", "log 0", "end_publish", "lost"),
        *("suspend", "recover [1, 2]", "rejoin", "publish", "end_publish", "dispatch"),
    ]


def test_a_step_is_logged_before_anything_of_the_next_one_is_reported():
    assert _obeyed([Suspend((0,)), Publish(1, overlapped=(1,))])[:3] == ["close", "log 0", "suspend"]
    assert _obeyed([Publish(1, overlapped=(1,)), START]) == ["send", "close", "log 0", "end_publish", "dispatch"]


def test_the_scorer_learns_which_samples_will_not_arrive():
    controller = make_controller([])
    controller.groups.num_noted_lost, controller.admission.running = 3, ()
    controller.note_lost(now=True)
    assert controller.scorer.lost == ["lost after 3"]


def test_the_reference_begins_what_is_complete_whenever_samples_are_awaited_and_is_waited_for_before_a_cut():
    order = []
    controller = make_controller(order)
    controller.groups.reference = Reference(order)
    controller.observe(0.0)
    assert order == ["begin"]
    controller.settle()
    assert order == ["begin", "settle", "acknowledge"]
