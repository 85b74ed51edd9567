"""In which order the controller obeys: what need not wait for the cards is done while they switch."""

import pytest

from stalesync.loop.controller import Controller
from stalesync.loop.step import Step
from stalesync.policy.commands import AdmitGroups, AwaitSamples, Dispatch, Publish, Suspend, Train
from tests.stalesync.loop.fakes import make_controller

START, FREEING = Dispatch({0: ()}, {}, frozenset({0})), Dispatch({0: ()}, {1: ["g/0"]}, frozenset({0}))


class Noting(Controller):
    """Notes what it would await, suspend and train."""

    def await_samples(self):
        self.groups.order.append("await_samples")

    def suspend(self, engines):
        self.groups.order.append("suspend")

    def train(self, trained, update=True):
        self.groups.order.append("train")


def _obeyed(commands, published=True):
    """Return what is done, in order, for the commands of a step. ``published``: no engine dies while weights are sent;
    else the first does."""
    order = []
    controller = make_controller(order, commands, published=published, kind=Noting)
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


def test_what_was_begun_behind_a_switch_that_has_failed_is_taken_back():
    begun = ["rejoin", "publish", "close", "admit"]
    returned = ["end_publish", "recover", "return of 1", "observe"]
    assert _obeyed([Publish(1), AdmitGroups(2), START, AwaitSamples()], published=False) == [
        *begun,
        "dispatch",
        "log 0",
        *returned,
        "await_samples",
    ]
    freed = _obeyed([Publish(1), AdmitGroups(2), FREEING, AwaitSamples()], published=False)
    assert freed == [*begun, "log 0", *returned, "await_samples"], "no engine has weights for these requests"


def test_engines_that_have_not_received_weights_beside_are_stopped():
    first = ["publish", "close", "log 0", "end_publish", "suspend", "recover"]
    assert _obeyed([Publish(1, overlapped=(1,)), Publish(1)], published=False)[:6] == first


def test_a_step_is_logged_before_anything_of_the_next_one_is_reported():
    assert _obeyed([Suspend((0,)), Publish(1, overlapped=(1,))])[:3] == ["close", "log 0", "suspend"]
    assert _obeyed([Publish(1, overlapped=(1,)), START]) == ["publish", "close", "log 0", "end_publish", "dispatch"]


def test_the_scorer_learns_which_samples_will_not_arrive():
    controller = make_controller([])
    controller.groups.num_noted_lost, controller.admission.running = 3, ()
    controller.note_lost(now=True)
    assert controller.scorer.lost == ["lost after 3"]
