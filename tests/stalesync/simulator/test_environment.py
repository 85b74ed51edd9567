"""Simulated conversations: nothing is lost, each turn waits for its environment, engines do other work meanwhile."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.environment import EnvironmentSpec
from stalesync.simulator.rank import Rank
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


def test_branches_begin_behind_their_share_of_the_turns_that_another_follows():
    def ends(share, number=0, sampled=40):
        return EnvironmentSpec(5, 3, 1.0, branch_share=share).row_ends(0, f"g/{number}", sampled)

    assert ends(0.0) == [52] and ends(1.0) == EnvironmentSpec(5, 3, 1.0).turn_ends(40)
    drawn = [ends(0.3, number) for number in range(500)]
    assert sum(len(one) - 1 for one in drawn) / (4 * 500) == pytest.approx(0.3, abs=0.05)
    assert all(one[-1] == 52 and {*one} <= {*ends(1.0)} for one in drawn) and drawn[7] == ends(0.3, 7)


def test_branches_are_prefilled_and_trained_behind_their_prompts(monkeypatch):
    prefilled, finish = [0], Rank.finish

    def counted(rank, plan, step, version):
        prefilled[-1] += sum(count for _, count in plan.chunks)
        return finish(rank, plan, step, version)

    monkeypatch.setattr(Rank, "finish", counted)

    def totals(share):
        config = config_of("separate", 0, steps=1, suspended="keep")
        run = simulation_of(config, environment=EnvironmentSpec(4, 4, 0.0, branch_share=share))
        run.run()
        prefilled.append(0)
        return run.totals()

    none, half, every = map(totals, (0.0, 0.5, 1.0))
    assert none.training_card_s < half.training_card_s < every.training_card_s
    assert 1.1 * prefilled[0] < prefilled[1] and 1.1 * prefilled[1] < prefilled[2], "behind the first prompt"
    assert none.done.decodes == half.done.decodes == every.done.decodes, "what a prompt repeats is not sampled"


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["colocated", "separate", "hybrid"]),
    st.integers(0, 2),
    st.sampled_from([None, 3]),
    st.sampled_from(["recompute", "keep"]),
    st.sampled_from([0.0, 1.0, 60.0]),
    st.sampled_from(["fifo", "least_generated", "history", "oracle", "context"]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 99),
)
def test_every_conversation_is_trained_once_with_all_its_tokens(
    deployment, bound, chunk, suspended, latency_s, order, branch_share, seed
):
    config = config_of(deployment, bound, steps=3, chunk_tokens=chunk, suspended=suspended, order=order)
    config.run.seed, environment = seed, EnvironmentSpec(3, 4, latency_s, spread=0.5, branch_share=branch_share)
    run = simulation_of(config, environment=environment)
    steps = run.run()
    trained = [group for step in steps for group in step.groups]
    assert len(trained) == len({*trained}) == config.run.steps * config.data.prompts_per_step
    assert all(0 <= lag <= bound for step in steps for lag in step.lags)
    cap = config.rollout.max_response_length - environment.observed
    forced = ForcedLengths(seed, config.rollout.sampling.forced_median, cap)
    size = config.algorithm.group_size
    lengths = [[*own] for own in forced.of_groups(trained, range(size))]
    sampled = {f"{group}/{n}": one for group, own in zip(trained, lengths, strict=True) for n, one in enumerate(own)}
    ends = [end for id, one in sampled.items() for end in environment.row_ends(seed, id, one)]
    assert sum(step.tokens for step in steps) == sum(ends) + len(ends) * PROMPT_TOKENS
    generated = sum(engine.decoded_tokens + engine.first_tokens for engine in run.cards.engines)
    if bound == 0:
        assert generated == sum(sampled.values()), "observations are not generated"
    limit = Bound(run.setup)
    assert limit(run.totals().done).total <= config.cluster.npus * run.clock.now * (1 + 1e-9)


def test_engines_work_for_others_while_conversations_are_away():
    """Eight conversations a slot: latency costs far less than where each engine would wait for its own."""

    def seconds(latency_s):
        config = config_of("separate", 1, group=16, suspended="keep", forced_spread=[0.0, 0.0, 0.0])
        config.device.pace_training = 31.5
        environment = EnvironmentSpec(4, 4, latency_s)
        return sum(step.seconds for step in simulation_of(config, NO_OVERHEADS, environment=environment).run())

    pace = simulation_of(config_of()).setup.engine.cost.pace
    step_s = pace.time_scale * simulation_of(config_of("separate", 1)).setup.engine.cost.roofline.step_lines(4)[0].fixed
    assert seconds(0.0) <= seconds(10 * step_s) < 1.2 * seconds(0.0)
