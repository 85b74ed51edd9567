"""Engines that die, as `stalesync.cards.card_failures` notices them; processes are futures that fail when they end."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from fusion.npu.failures import FailureKind, RankFailure
from stalesync.cards import card_failures
from stalesync.cards.card_failures import CardFailures
from stalesync.cards.stage_calls import RunningStage
from stalesync.policy.engine_deaths import EngineDeaths
from stalesync.process.failures import FailedStage

ENGINES = [(1, 2), (3,)]


class Process:
    def __init__(self):
        self.end = Future()
        self.watch = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: self.end))

    def kill(self):
        self.end.set_exception(RuntimeError("killed"))


class Actors(dict):
    hosts = ()

    def end(self, ranks):
        """The processes of a dead engine end when the test says so."""


@pytest.fixture
def watched():
    actors = Actors({rank: Process() for rank in range(4)})
    watch = CardFailures(ENGINES, EngineDeaths(ENGINES, [1, 2, 3], 3), actors=actors, running=[], health_checks=[])
    watch.watch()
    return watch, actors


def dies(watch, rank):
    """Have a card die in its stage; return whether the run goes on."""
    stage = RunningStage("generate", (rank,), {})
    watch.observe(stage, FailedStage(RankFailure(rank, "generate", FailureKind.DIED, "RayActorError", "died")))
    return stage.died


def test_a_death_is_reported_once_and_not_that_of_the_other_cards_of_its_engine(watched):
    watch, processes = watched
    processes[1].kill()
    assert [rank for rank, _ in watch.take_ended()] == [1]
    assert dies(watch, 1)
    processes[2].kill()
    assert list(watch.take_ended()) == [] and watch.is_down(2) and not watch.is_down(3)
    assert watch.take_dead().keys() == {0} and watch.take_dead() == {}
    watch.observe_restarted(0)
    assert not watch.is_down(1)


@pytest.mark.parametrize("first_by", ["its stage", "its end"])
def test_a_dead_engine_is_reported_when_all_its_processes_have_ended(watched, first_by):
    watch, processes = watched
    processes[1].kill()
    if first_by == "its end":
        list(watch.take_ended())
    dies(watch, 1)
    reported = []
    waiting = threading.Thread(target=lambda: reported.append(watch.take_dead()))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive() and not reported
    processes[2].kill()
    waiting.join()
    assert reported[0].keys() == {0}


def test_processes_whose_end_is_not_known_are_not_awaited_for_ever(watched, monkeypatch):
    watch, processes = watched
    monkeypatch.setattr(card_failures, "MAX_END_S", 0.05)
    dies(watch, 3)
    assert watch.take_dead().keys() == {1}
