"""The controller's side of the engines, without any."""

from types import SimpleNamespace

import pytest

from fusion.inference.config import RolloutConfig
from stalesync.cards import CardFailed, Running
from stalesync.generation import Generation
from stalesync.prompts import Prompt


class Calls:
    """In place of the cards: notes what is begun."""

    timeout_s = 100.0

    def __init__(self):
        self.begun = []

    def begin(self, stage, each, ranks):
        self.begun.append((stage, {rank: [request.id for request in each[rank][0]] for rank in ranks}))
        return Running(stage, ranks, {})

    def silent(self, ranks):
        return f"; of {list(ranks)} none answered"


def _generation():
    spec = SimpleNamespace(rollout=RolloutConfig(forced_median=4), seed=0, engines=[(0, 1), (2, 3)], world=4)
    cards = Calls()
    made = Generation(spec, cards, 2, lambda reports: None)
    made.admit([Prompt("a", (1, 2, 3), "", ""), Prompt("b", (4,), "", "")])
    made.resume([0, 1])
    return made, cards


def test_an_engines_first_card_gets_its_requests():
    made, cards = _generation()
    assert cards.begun == [("generate", {0: ["a/0", "a/1"], 1: []}), ("generate", {2: ["b/0", "b/1"], 3: []})]
    assert made.of_cards([3]) == [1] and made.of_cards([]) == []


def test_engines_that_are_silent_are_spoken_of_and_then_end_the_run(caplog):
    made, _ = _generation()
    made.check_alive(10.0)
    assert not caplog.messages
    for silent_s in (31.0, 40.0, 62.0, 0.5, 31.0):
        made.check_alive(silent_s)
    assert [message.split(": ")[0] for message in caplog.messages] == [
        "no sample has come for 31 s",
        "no sample has come for 62 s",
        "no sample has come for 31 s",
    ]
    with pytest.raises(
        CardFailed,
        match=r"for 101 s \(cluster.stage_timeout_s\): engine 0 \(ranks \[0, 1\]\) has 2 sam.*of \[0, 1, 2, 3\]",
    ):
        made.check_alive(101.0)
