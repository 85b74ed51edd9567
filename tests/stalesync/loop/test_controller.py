"""In which order the controller obeys: what need not wait for the cards is done while they switch."""

from types import SimpleNamespace

import pytest

from stalesync.loop.controller import Controller
from stalesync.policy.commands import AdmitGroups, AwaitSamples, Dispatch, Publish, Suspend, Train

START, FREEING = Dispatch({0: ()}, {}, frozenset({0})), Dispatch({0: ()}, {1: ["g/0"]}, frozenset({0}))


class Generation:
    """In place of the engines: records what is called."""

    def __init__(self, order):
        self.order, self.publishing, self.published = order, False, True

    def publish(self, command, share, meanwhile):
        self.order.append("publish")
        meanwhile()
        self.publishing = not command.beside
        return self.published or self.publishing

    def end_publish(self):
        self.order.append("end_publish")
        self.publishing = False
        return self.published

    def recover(self):
        self.order.append("recover")

    def dispatch(self, command):
        self.order.append("dispatch")


def _obeyed(commands, published=True):
    """What is done, in order, for the commands of a step. ``published``: no engine dies while weights are sent; else
    the first does."""
    order = []
    controller = object.__new__(Controller)
    controller.config = SimpleNamespace(run=SimpleNamespace(steps=9), cluster=SimpleNamespace(npus=1))
    controller._num_tokens = 1
    controller.admission = SimpleNamespace(
        step=lambda *_: iter(commands), stage="switch", observe_seconds=lambda *_: None, running=[0, 1]
    )
    controller.cards = SimpleNamespace(is_down=lambda engine: engine == 0)
    controller.desk = SimpleNamespace(read=lambda *_: "", share=None)
    controller.view = SimpleNamespace(begin_step=lambda *_: None, phase=lambda *_: None)
    metrics = SimpleNamespace(update=lambda *_: None, add=lambda *_: None)
    controller.step_metrics = SimpleNamespace(metrics=metrics, take=lambda *_: None, add_seconds=lambda *_: None)
    controller.scorer = SimpleNamespace(take_reports=lambda: [])
    controller.source = SimpleNamespace(next=lambda count: [])
    controller.groups = SimpleNamespace(admit=lambda prompts: order.append("admit"))
    controller.generation = Generation(order)
    controller.generation.published = published
    controller.restarts = SimpleNamespace(
        check=lambda: None,
        rejoin=lambda: order.append("rejoin"),
        return_unstarted=lambda engine: order.append(f"return of {engine}"),
        observe=lambda: order.append("observe"),
    )
    for name in ("await_samples", "suspend", "train"):
        setattr(controller, name, lambda *_, name=name: order.append(name))
    controller.train_step(1, lambda: order.append("close_last"), lambda: order.append("log_last"))
    once = [call for place, call in enumerate(order) if call != "log_last" or call not in order[:place]]
    return once  # `log_last` is called again where it has nothing to do


def test_engines_are_started_before_the_last_step_is_logged_and_the_switch_awaited():
    commands = [Publish(1), AdmitGroups(2), START, AwaitSamples(), Suspend((0,)), Train(("g",))]
    first = ["rejoin", "publish", "close_last", "admit", "dispatch", "log_last", "end_publish"]
    assert _obeyed(commands) == [*first, "await_samples", "suspend", "train"]


@pytest.mark.parametrize("command", [FREEING, AwaitSamples(), Suspend((0,)), Train(("g",))])
def test_a_command_for_cards_that_have_switched_waits_for_them(command):
    order = _obeyed([Publish(1), AdmitGroups(2), command])
    assert order[:-1] == ["rejoin", "publish", "close_last", "admit", "log_last", "end_publish"]


def test_what_was_begun_behind_a_switch_that_has_failed_is_taken_back():
    begun = ["rejoin", "publish", "close_last", "admit"]
    returned = ["end_publish", "recover", "return of 1", "observe"]
    assert _obeyed([Publish(1), AdmitGroups(2), START, AwaitSamples()], published=False) == [
        *begun,
        "dispatch",
        "log_last",
        *returned,
        "await_samples",
    ]
    freed = _obeyed([Publish(1), AdmitGroups(2), FREEING, AwaitSamples()], published=False)
    assert freed == [*begun, "log_last", *returned, "await_samples"], "no engine has weights for these requests"


def test_engines_that_have_not_received_weights_beside_are_stopped():
    assert _obeyed([Publish(1, beside=(1,)), Publish(1)], published=False)[:4] == [
        "publish",
        "log_last",
        "suspend",
        "recover",
    ]


def test_a_step_is_logged_before_anything_of_the_next_one_is_reported():
    assert _obeyed([Suspend((0,)), Publish(1, beside=(1,))])[:2] == ["log_last", "suspend"]
    assert _obeyed([Publish(1, beside=(1,)), START]) == ["publish", "log_last", "dispatch"]


def test_the_scorer_learns_which_samples_will_not_arrive():
    controller, given_up = object.__new__(Controller), []
    controller._lost_polled_s = 0.0
    controller.queue = SimpleNamespace(lost=lambda num_noted: [num_noted])
    controller.groups = SimpleNamespace(num_noted_lost=3, note_lost=lambda lost: [f"lost {lost}"])
    controller.scorer = SimpleNamespace(note_lost=given_up.extend)
    controller.admission = SimpleNamespace(running=())
    controller.note_lost(now=True)
    assert given_up == ["lost [3]"]
