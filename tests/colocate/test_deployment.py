"""The invariants of `fusion.colocate.deployment`, over all deployments that fit a number of cards."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.colocate import FusionConfig
from fusion.colocate.deployment import Deployment, Role, deploy
from fusion.telemetry.keys import unused

NO_BOUND = SimpleNamespace(max_staleness=0)
CONFIGS = st.builds(
    FusionConfig,
    deployment=st.sampled_from(["separate", "colocated", "full", "hybrid"]),
    infer_cards=st.none() | st.integers(1, 6),
    score_cards=st.integers(0, 3),
).filter(lambda config: [*unused(config, "fusion", SimpleNamespace(fusion=config, stalesync=NO_BOUND))] == [])
"""Those in which every key has an effect"""


@given(CONFIGS, st.integers(1, 12), st.booleans(), st.booleans(), st.integers(1, 4))
def test_every_role_has_its_cards_and_no_engine_straddles(config, npus, reference, reward_model, size):
    try:
        deployment = deploy(config, npus, reference, reward_model)
    except ValueError as refused:
        assert "fusion." in str(refused)
        return
    assert deployment.world == npus
    needed = {Role.ACTOR_TRAIN, Role.ACTOR_GENERATION}
    needed |= {Role.REFERENCE} if reference else set()
    needed |= {Role.REWARD_MODEL} if reward_model else set()
    hosted = [deployment.roles_of(rank) for rank in range(npus)]
    assert all(hosted) and frozenset().union(*hosted) == needed
    for role in needed:
        cards = deployment.cards_of(role)
        assert cards == tuple(range(cards[0], cards[0] + len(cards))), "neighbours"
    kinds = [0 if Role.ACTOR_TRAIN in roles else 1 if Role.ACTOR_GENERATION in roles else 2 for roles in hosted]
    assert kinds == sorted(kinds)
    sharing = {"separate": set(), "colocated": set(deployment.train), "full": set(deployment.train)}
    assert set(deployment.shared) == sharing.get(config.deployment, set(deployment.train))
    if config.deployment == "full":
        assert all(roles == needed for roles in hosted), "one card, every job"
    try:
        engines = deployment.engines(size)
    except ValueError as refused:
        assert "parallel.infer" in str(refused) and "fusion.infer_cards" in str(refused)
        return
    assert [rank for engine in engines for rank in engine] == list(deployment.generate)
    assert all(len({rank in deployment.train for rank in engine}) == 1 for engine in engines)


@pytest.mark.parametrize(
    ("changes", "npus", "message"),
    [
        ({"deployment": "separate"}, 1, "fusion.deployment=separate on cluster.npus=1 with fusion.infer_cards=null"),
        ({"deployment": "hybrid", "infer_cards": 4}, 4, "expected at least one card that trains and one that only gen"),
        ({"score_cards": 4}, 4, "fusion.score_cards=4: expected at least one card that trains"),
    ],
)
def test_what_does_not_fit_the_cards_is_said_with_its_keys(changes, npus, message):
    with pytest.raises(ValueError, match=message):
        deploy(FusionConfig(**changes), npus, reference=True, reward_model=False)


def test_cards_for_scoring_need_something_to_score():
    with pytest.raises(ValueError, match="fusion.score_cards=1: nothing would run on them, as algorithm.kl_coef is 0"):
        deploy(FusionConfig(score_cards=1), 4, reference=False, reward_model=False)


def test_an_engine_does_not_straddle_cards_that_train_and_cards_that_do_not():
    hybrid = deploy(FusionConfig(deployment="hybrid", infer_cards=1), 4, reference=True, reward_model=False)
    assert hybrid.describe() == "actor_train 0-2, actor_generation 0-3, reference 0-2"
    with pytest.raises(
        ValueError, match="an engine takes 2 cards, which does not divide the 3 cards that train and ge"
    ):
        hybrid.engines(2)
    assert Deployment.colocated(4).engines(2) == [(0, 1), (2, 3)]
