"""What is given up when an engine's card has died, without Ray: the stages have nothing pending."""

from types import SimpleNamespace

import pytest

from fusion.colocate import Deployment
from fusion.npu.failures import FailureKind, RankFailure
from stalesync.cards.card_failures import CardFailures
from stalesync.cards.cards import Cards
from stalesync.cards.stage_calls import EnginesLost, RunningStage
from stalesync.policy.engine_deaths import EngineDeaths
from stalesync.process.failures import FailedStage

ENGINES = [(1,), (2,)]
SEPARATE = Deployment((0,), (1, 2))


def stage(name, ranks, done=(), begun_s=0.0):
    return RunningStage(name, ranks, {}, dict.fromkeys(done), begun_s=begun_s)


def lost_after(death, *stages):
    """Card 1 dies in the stage ``death``, beside ``stages``; returns which of them have no results for that."""
    ended = []
    actors = SimpleNamespace(end=ended.extend, hosts=[])
    failures = CardFailures(
        ENGINES, EngineDeaths.of(SEPARATE, ENGINES, 3), actors=actors, running=[death, *stages], health_checks=[]
    )
    failures.observe(death, FailedStage(RankFailure(1, death.stage, FailureKind.DIED, "RayActorError", "died"), None))
    assert death.died and ended == [1]
    return [one.died for one in stages]


@pytest.mark.parametrize(
    ("ranks", "done", "broken"),
    [((0, 1, 2), (), True), ((0, 1, 2), (1,), False), ((0,), (), False)],
    ids=["waits for the card", "has had it", "among others"],
)
def test_a_transfer_is_broken_off_only_if_it_waits_for_the_card_and_then_what_was_begun_behind_it(ranks, done, broken):
    switch, behind = stage("switch", ranks, done), stage("generate", (2,), begun_s=1.0)
    assert lost_after(stage("generate", (1,), begun_s=1.0), switch, behind) == [broken, broken]


def test_engines_that_receive_beside_the_switch_go_on_generating():
    receiving, switching = stage("receive", (1, 2)), stage("switch", (0,))
    generating = stage("generate", (2,), begun_s=-1.0)
    assert lost_after(stage("generate", (1,)), receiving, switching, generating) == [True, True, False]


def test_stages_are_all_awaited_before_it_is_said_that_engines_are_lost():
    awaited, stages = [], [stage("switch", (0,)), stage("receive", (1,), (1,))]
    cards = SimpleNamespace(_await_end=awaited.append)
    stages[0].died = True
    with pytest.raises(EnginesLost):
        Cards.wait_all(cards, stages)
    assert awaited == stages
    stages[0].died, stages[0].results[0] = False, "report"
    assert Cards.wait_all(cards, stages) == [["report"], [None]]
