"""Simulated runs keep the invariants of real ones, and those of physics."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.pace import TrainerCost
from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.lengths import DrawnLengths
from stalesync.simulator.run import SimulatedRun
from stalesync.simulator.setup import Overheads
from stalesync.simulator.work import MANY, Bound
from tests.stalesync.simulator.configs import NO_OVERHEADS, PROMPT_TOKENS, config_of, simulation_of

DEPLOYMENTS = st.sampled_from(["colocated", "separate", "hybrid", "full"])
SCORING = st.sampled_from(["", "", "reference", "reward model", "reference and reward model"])


def _score_by(config, scoring, *, apart):
    """Give a config models that score, ``apart``: on two further cards."""
    config.algorithm.kl_coef = 0.1 if "reference" in scoring else 0.0
    config.reward.model = "judge" if "reward" in scoring else None
    if apart and scoring:
        config.fusion.score_cards = 2
        config.cluster.npus += 2


@settings(max_examples=12, deadline=None)
@given(DEPLOYMENTS, st.integers(0, 2), st.sampled_from([None, None, 5]), st.booleans(), SCORING, st.integers(0, 99))
def test_every_group_is_trained_once_within_the_bound_and_no_token_is_lost(
    deployment, bound, chunk, keeps, scoring, seed
):
    config = config_of(deployment, bound, steps=3, chunk_tokens=chunk, suspended="keep" if keeps else "recompute")
    config.run.seed = seed
    _score_by(config, scoring, apart=deployment != "full" and seed % 2 == 0)
    run = simulation_of(config)
    steps = run.run()
    admitted = [group for one in run.made if one["kind"] == "admit" for group in one["groups"]]
    trained = [group for step in steps for group in step.groups]
    assert len(trained) == len({*trained}) == config.run.steps * config.data.prompts_per_step
    assert {*trained} <= {*admitted} and len({*admitted}) == len(admitted)
    assert all(0 <= lag <= bound for step in steps for lag in step.lags), "the ledger asserts it, too"
    forced = ForcedLengths(seed, config.rollout.sampling.forced_median, config.rollout.max_response_length)
    size = config.algorithm.group_size
    lengths = [sum(own) for own in forced.of_groups(trained, range(size))]
    assert sum(step.tokens for step in steps) == sum(lengths) + PROMPT_TOKENS * size * len(trained)
    assert not any(engine.running for engine in run.cards.engines)
    if len(admitted) == len(trained):
        generated = sum(engine.decoded_tokens + engine.first_tokens for engine in run.cards.engines)
        assert generated == sum(lengths), "a token is generated once, also where its request was suspended"


@settings(max_examples=12, deadline=None)
@given(DEPLOYMENTS, st.integers(0, 2), st.booleans(), st.integers(0, 99))
def test_a_run_is_never_faster_than_its_work_conserving_bound(deployment, bound, overheads, seed):
    config = config_of(deployment, bound, steps=3)
    config.run.seed = seed
    run = simulation_of(config, None if overheads else NO_OVERHEADS)
    steps, cards = run.run(), config.cluster.npus
    limit = Bound(run.setup)
    assert limit(run.totals().done).total <= cards * run.clock.now * (1 + 1e-9)
    if bound == 0:
        for step in steps:
            assert limit(step.work).total <= cards * step.seconds * (1 + 1e-9)


def test_the_bound_holds_where_few_tokens_take_as_long_as_their_launches_and_many_do_not():
    config, card = config_of(steps=2), hardware_named("ascend_910c")
    config.parallel.infer.ep = config.cluster.npus
    slow_host = replace(card, launch_s=replace(card.launch_s, value=200e-6))
    run = simulation_of(config, hardware=slow_host)
    cost = run.setup.engine.cost
    assert len(cost.roofline.step_lines(cost.full_batch)) > len(cost.roofline.step_lines(MANY))
    run.run()
    done = run.totals().done
    faster = Bound(simulation_of(config).setup)(done).total
    assert 2 * faster < Bound(run.setup)(done).total <= config.cluster.npus * run.clock.now


def test_models_on_cards_of_their_own_score_while_others_generate_and_on_cards_that_train_in_their_time():
    """Two cards take twice as long as four; but what is complete is scored meanwhile."""

    @cache
    def seconds(scoring="", apart=False):
        config = config_of("colocated", 0, prompts=16, forced_median=20.0, steps=2)
        _score_by(config, scoring, apart=apart)
        run = simulation_of(config, NO_OVERHEADS)
        run.run()
        return run.clock.now

    plain = seconds()
    for scoring in ("reference", "reward model"):
        shared, own = seconds(scoring), seconds(scoring, apart=True)
        assert plain < own < shared, scoring
        assert own - plain < 0.5 * (shared - plain), scoring
    both, own = seconds("reference and reward model"), seconds("reference and reward model", apart=True)
    assert both > max(seconds("reference"), seconds("reward model")) and plain < own < both


def test_cards_of_a_reference_compute_one_call_after_the_other(monkeypatch):
    """At staleness 0 each call is of one group: 16 a step."""
    config = config_of("colocated", 0, prompts=16, forced_median=20.0)
    _score_by(config, "reference", apart=True)
    run = simulation_of(config, NO_OVERHEADS)
    monkeypatch.setattr(TrainerCost, "forward", lambda *args: {"logprobs": 1.0})
    run.run()
    assert run.clock.now > 16 * len(run.steps)


@pytest.mark.parametrize("deployment, bound", [("colocated", 0), ("hybrid", 1), ("separate", 2)])
def test_cards_of_twice_the_speed_take_half_the_time(deployment, bound):
    """With a host that takes no time; samples wait for others as long on both, so that wait is compared to 0."""
    slow, fast = (
        simulation_of(config_of(deployment, bound, speed=speed), NO_OVERHEADS).run() for speed in (1e-3, 2e-3)
    )
    assert [step.groups for step in slow] == [step.groups for step in fast]
    for one, other in zip(slow, fast, strict=True):
        assert one.seconds == pytest.approx(2 * other.seconds, rel=1e-3)


def test_a_seed_repeats_a_run_exactly_and_another_does_not():
    def seconds(seed):
        config = config_of("hybrid", 1)
        config.run.seed = seed
        return [step.seconds for step in simulation_of(config).run()]

    assert seconds(1) == seconds(1) != seconds(2)


@pytest.mark.parametrize("scoring", ["", "reference"])
def test_a_step_whose_samples_share_their_prompts_trains_and_scores_faster(scoring):
    def simulated(share, apart=False):
        config = config_of(group=8)
        config.training.share_prefixes = share
        _score_by(config, scoring, apart=apart)
        run = simulation_of(config, NO_OVERHEADS)
        run.run()
        return run

    for apart in (False, True):
        shared, whole = simulated("auto", apart), simulated("off", apart)
        assert [one.groups for one in shared.steps] == [one.groups for one in whole.steps]
        assert [one.tokens for one in shared.steps] == [one.tokens for one in whole.steps], "tokens are tokens"
        assert sum(one.train_s for one in shared.steps) < 0.95 * sum(one.train_s for one in whole.steps)
        limits = [Bound(run.setup)(run.totals().done) for run in (shared, whole)]
        assert limits[0].training < 0.95 * limits[1].training and limits[0].generation == limits[1].generation


def test_what_the_host_takes_makes_a_run_longer():
    config = config_of()
    free, real = (simulation_of(config, one).run() for one in (NO_OVERHEADS, replace(Overheads(), call_s=0.5)))
    calls = 0.5 * config.cluster.npus
    for one, other in zip(free, real, strict=True):
        assert other.seconds > one.seconds + 3 * calls, "switch, engines' start, return and training call every card"


def test_generation_of_separate_cards_overlaps_with_training_at_staleness_1():
    apart, ahead = (sum(one.seconds for one in simulation_of(config_of("separate", s)).run()) for s in (0, 1))
    assert ahead < 0.9 * apart


def test_a_small_kv_cache_makes_engines_preempt_and_a_run_longer():
    config = config_of(cards=1, prompts=8, max_seqs=32)
    ample, small = simulation_of(config), simulation_of(config, kv_tokens=64)
    ample.run()
    small.run()
    assert ample.totals().preemptions == 0 < small.totals().preemptions
    assert small.clock.now > ample.clock.now


def test_a_source_of_prompts_is_asked_for_what_is_admitted_only():
    config = config_of("colocated", 1, steps=3)

    class Counted(DrawnLengths):
        taken = 0

        def next(self, count):
            self.taken += count
            return super().next(count)

    forced = ForcedLengths(0, 8.0, 40)
    lengths = Counted(forced, config.algorithm.group_size, PROMPT_TOKENS)
    run = SimulatedRun(simulation_of(config).setup, lengths)
    run.run()
    assert lengths.taken == 3 * config.data.prompts_per_step, "nothing is admitted that no step can train"


def test_only_runs_of_many_samples_exclude_the_objects_of_the_process_from_collections(monkeypatch):
    counts = []

    def seldom(count):
        counts.append(count)
        return nullcontext()

    monkeypatch.setattr("stalesync.simulator.run.collecting_seldom", seldom)
    simulation_of(config_of(steps=1)).run()
    assert not counts
    monkeypatch.setattr("stalesync.simulator.run.FEW_SAMPLES", 31)
    simulation_of(config_of(steps=1)).run()
    assert counts == [32]
