"""Simulated conversations: nothing is lost, each turn waits for its environment, engines do other work meanwhile."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.environment import EnvironmentSpec
from stalesync.simulator.work import Bound
from tests.stalesync.simulator.configs import NO_OVERHEADS, PROMPT_TOKENS, config_of, simulation_of


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 99))
def test_turns_are_even_parts_of_what_is_sampled_with_observations_between_them(turns, observation, sampled):
    spec = EnvironmentSpec(turns, observation, 1.0)
    parts = spec.turns_of(sampled)
    assert [end for _, end in parts] == spec.turn_ends(sampled) and len(parts) == min(turns, sampled)
    lengths = [end - begin for begin, end in parts]
    assert sum(lengths) == sampled and 1 <= min(lengths) and max(lengths) - min(lengths) <= 1
    assert [later - end for (_, end), (later, _) in zip(parts, parts[1:], strict=False)] == [observation] * (
        len(parts) - 1
    )
    for begin, end in parts:
        assert {spec.turn_end(generated, sampled) for generated in range(begin, end)} == {end}


def test_latencies_have_the_median_and_depend_on_seed_request_and_turn():
    spec = EnvironmentSpec(2, 1, 3.0, spread=0.7)
    drawn = [spec.draw_latency_s(0, f"g/{number}", 5) for number in range(999)]
    assert median(drawn) == pytest.approx(3.0, rel=0.1) and drawn[7] == spec.draw_latency_s(0, "g/7", 5)
    assert len({spec.draw_latency_s(seed, "g/7", turn) for seed in range(3) for turn in range(3)}) == 9


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["colocated", "separate", "hybrid"]),
    st.integers(0, 2),
    st.sampled_from([None, 3]),
    st.sampled_from(["recompute", "keep"]),
    st.sampled_from([0.0, 1.0, 60.0]),
    st.sampled_from(["fifo", "least_generated", "history", "oracle", "context"]),
    st.integers(0, 99),
)
def test_every_conversation_is_trained_once_with_all_its_tokens(
    deployment, bound, chunk, suspended, latency_s, order, seed
):
    config = config_of(deployment, bound, steps=3, chunk_tokens=chunk, suspended=suspended, order=order)
    config.run.seed, environment = seed, EnvironmentSpec(3, 4, latency_s, spread=0.5)
    run = simulation_of(config, environment=environment)
    steps = run.run()
    trained = [group for step in steps for group in step.groups]
    assert len(trained) == len({*trained}) == config.run.steps * config.data.prompts_per_step
    assert all(0 <= lag <= bound for step in steps for lag in step.lags)
    cap = config.rollout.max_response_length - environment.observed
    forced = ForcedLengths(seed, config.rollout.sampling.forced_median, cap)
    size = config.algorithm.group_size
    sampled = [one for own in forced.of_groups(trained, range(size)) for one in own]
    total = sum(environment.turn_ends(one)[-1] + PROMPT_TOKENS for one in sampled)
    assert sum(step.tokens for step in steps) == total
    generated = sum(engine.decoded_tokens + engine.first_tokens for engine in run.cards.engines)
    if bound == 0:
        assert generated == sum(sampled), "observations are not generated"
    limit = Bound(run.setup)
    assert limit(run.totals().done).total <= config.cluster.npus * run.clock.now * (1 + 1e-9)


def test_engines_work_for_others_while_conversations_are_away():
    """Eight conversations a slot: latency costs far less than where each engine would wait for its own."""

    def seconds(latency_s):
        config = config_of("separate", 1, group=16, suspended="keep", forced_spread=[0.0, 0.0, 0.0])
        environment = EnvironmentSpec(4, 4, latency_s)
        return sum(step.seconds for step in simulation_of(config, NO_OVERHEADS, environment=environment).run())

    pace = simulation_of(config_of()).setup.engine.cost.pace
    step_s = pace.time_scale * simulation_of(config_of("separate", 1)).setup.engine.cost.roofline.step_lines(4)[0].fixed
    assert seconds(0.0) <= seconds(10 * step_s) < 1.2 * seconds(0.0)
