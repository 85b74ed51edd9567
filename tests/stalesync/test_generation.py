"""The controller's side of the engines, without any."""

from functools import partial
from types import SimpleNamespace

import pytest

from fusion.colocate import Deployment, Worker
from fusion.inference.config import RolloutConfig
from fusion.model import Parallel
from fusion.rollout import SuspendedSample
from stalesync.cards import RunningStage
from stalesync.failures import CardFailed
from stalesync.generation import Generation
from stalesync.prompts import Prompt


class Calls:
    """In place of the cards: notes what is begun."""

    timeout_s = 100.0

    def __init__(self):
        self.begun = []
        self.chunks = {}
        """By card"""

    def begin_each(self, calls):
        (stage,) = {call.stage for call in calls.values()}
        self.begun.append((stage, {rank: [one.id for one in call.args[0]] for rank, call in calls.items()}))
        return RunningStage(stage, tuple(calls), {})

    def on(self, ranks):
        return SimpleNamespace(ask=partial(self.ask, ranks))

    def ask(self, ranks, request, *args):
        if request is Worker.take_ended_chunks:
            return [self.chunks.pop(rank, []) for rank in ranks]
        (requests,) = args
        self.begun.append((request.__name__, {ranks[0]: [getattr(one, "id", one) for one in requests]}))

    def describe_unresponsive(self, ranks):
        return f"; of {list(ranks)} none answered"


def _generation(ahead=False, **rollout):
    spec = SimpleNamespace(
        rollout=RolloutConfig(forced_median=4, **rollout),
        seed=0,
        engines=[(0, 1), (2, 3)],
        world=4,
        infer_of_one_engine=Parallel(2, ep=2),
        ahead=ahead,
        deployment=Deployment((0, 1), (0, 1, 2, 3), (), ()),
    )
    cards = Calls()
    made = Generation(spec, cards, 2, lambda reports: None)
    made.admit([Prompt("a", (1, 2, 3), "", ""), Prompt("b", (4,), "", "")])
    made.resume([0, 1])
    return made, cards


def test_an_engines_first_card_gets_its_requests():
    made, cards = _generation()
    assert cards.begun == [("generate", {0: ["a/0", "a/1"], 1: []}), ("generate", {2: ["b/0", "b/1"], 3: []})]
    assert made.of_cards([3]) == [1] and made.of_cards([]) == []


def test_an_engine_that_runs_ahead_gets_what_it_can_begin_with_and_more_when_it_runs_low():
    made, cards = _generation(ahead=True, max_seqs=2)  # two ranks of two each: 6 at most, more at 5
    assert made.groups_wanted([0, 1]) == 4, "12 requests, of which it has 4"
    made.admit([Prompt(name, (1,), "", "") for name in "cdefg"])
    assert made.groups_wanted([0, 1]) == 0 and made.hungry
    made.hand_over()
    assert [made.buffer.num_running_on(engine) for engine in (0, 1)] == [6, 6] and len(made.buffer.of("waiting")) == 2
    assert not made.hungry and {name for name, _ in cards.begun} == {"generate", "submit"}
    made.buffer.finish("a/0", 3)
    assert made.hungry
    made.hand_over()
    assert made.buffer.num_running_on(0) == 6 and len(made.buffer.of("waiting")) == 1


def test_what_ends_with_its_chunk_goes_on_where_its_kv_is_or_where_there_is_room(monkeypatch):
    monkeypatch.setattr("stalesync.generation.CHUNK_LOOK_S", 0.0)
    made, cards = _generation(ahead=True, max_seqs=1, max_batch_tokens=8, chunk_tokens=2, suspended_kv="keep")
    assert [ids for _, ids in cards.begun] == [{0: ["a/0", "a/1"], 1: []}, {2: ["b/0", "b/1"], 3: []}]
    cards.chunks = {
        1: [SuspendedSample("a/0", 2, "a/0~2", (0, 0), 1)],
        3: [SuspendedSample("b/0", 2, "b/0~2", (0, 0), 1)],
    }
    del cards.begun[:]
    assert made.gather() == 2 and made.gather() == 0
    assert [entry.id for entry in made.buffer.of("waiting")] == ["a/0", "b/0"]
    made.resume([0])  # the other is to train
    assert cards.begun == [("submit", {0: ["a/0", "b/0"]}), ("forget", {2: ["b/0"]})]
    assert made.buffer.entries["b/0"].kv is None and made.buffer.entries["a/0"].kv == (0, 1)


def test_nobody_is_asked_for_chunks_where_there_are_none():
    made, cards = _generation()
    cards.on = None
    assert made.gather() == 0


def test_engines_go_on_beside_where_all_that_only_generate_run_and_no_others():
    made, _ = _generation(ahead=True)
    assert made.go_on_beside([0, 1]) == [], "an engine of cards that train runs too"
    del made._running[0]
    assert made.go_on_beside([0, 1]) == [2, 3]
    assert made.go_on_beside([0]) == [], "this one is to be laid off"
    synchronous, _ = _generation()
    del synchronous._running[0]
    assert synchronous.go_on_beside([0, 1]) == [], "at staleness 0 all stop for new weights"


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
