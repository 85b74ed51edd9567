from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.training import AlgorithmConfig, TrainingConfig
from fusion.training.algorithms import find_algorithm, make_algorithm
from fusion.training.config import ALGORITHMS, COMPARE_SIBLINGS, CORRECTIONS
from fusion.training.corrections import make_correction
from fusion.training.schedule import Schedule


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainingConfig(lr=-1), "training.lr=-1: expected a number of at least 0"),
        (TrainingConfig(betas=[0.9]), r"training.betas=\[0.9\]: expected two numbers"),
        (TrainingConfig(betas=[0.9, 1.0]), "training.betas"),
        (TrainingConfig(schedule="cosin"), "training.schedule='cosin': expected one of constant, cosine"),
        (TrainingConfig(token_budget=0), "training.token_budget=0: expected a whole number of at least 1"),
        (TrainingConfig(warmup_steps=1.5), "training.warmup_steps=1.5"),
        (TrainingConfig(clip_grad=float("nan")), "training.clip_grad=nan"),
        (
            AlgorithmConfig(name="gropo"),
            "algorithm.name='gropo': expected one of grpo, dr_grpo, dapo, gspo, rloo, reinforce_plus_plus$",
        ),
        (AlgorithmConfig(kl_in="los"), "algorithm.kl_in='los': expected one of loss, reward"),
        (AlgorithmConfig(loss_aggregation="mean"), "algorithm.loss_aggregation='mean': expected one of token_mean, "),
        (AlgorithmConfig(correction="tis"), "algorithm.correction='tis': expected one of none, tis_token, "),
        (
            AlgorithmConfig(correction="icepop", correction_cap=0.5),
            "algorithm.correction_cap=0.5: expected a number",
        ),
        (
            AlgorithmConfig(correction="icepop", correction_floor=1.5),
            "algorithm.correction_floor=1.5: expected",
        ),
        (
            AlgorithmConfig(correction_cap=2.0),
            r"algorithm.correction_cap=2.0: expected null \(the default\) with algorithm.correction=null",
        ),
        (
            AlgorithmConfig(correction="decoupled", correction_floor=0.5),
            "it is used with algorithm.correction=icepop or mask_sequence",
        ),
        (AlgorithmConfig(overlong_buffer=-1), "algorithm.overlong_buffer=-1: expected a whole number of at least 0"),
        *(
            (
                AlgorithmConfig(name=name, group_size=1),
                f"algorithm.group_size=1: expected at least 2, .*{name} compares",
            )
            for name in COMPARE_SIBLINGS
        ),
        (AlgorithmConfig(group_size=0), r"algorithm.group_size=0: expected a whole number in \[1, 100000\]"),
        (AlgorithmConfig(clip_low=1.0), r"algorithm.clip_low=1.0: expected a number in \[0, 1\)"),
        (AlgorithmConfig(minibatches=0), "algorithm.minibatches=0"),
        (AlgorithmConfig(replay="r3"), "algorithm.replay='r3': expected one of none, train, rollout"),
        (AlgorithmConfig(group_size=True), "algorithm.group_size=true"),
    ],
)
def test_a_wrong_value_is_refused_by_key(config, message):
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_the_weight_of_the_balancing_loss_and_its_origin_are_described():
    default, stated = TrainingConfig(), TrainingConfig(load_balancing_coef=0.01)
    assert (default.balancing_coef, stated.balancing_coef) == (0, 0.01)
    origin = "the default, not 0.001 of the model's config.json"
    assert default.describe_balancing(0.001) == f"training.load_balancing_coef=0: {origin}"
    assert stated.describe_balancing(0.001) == "training.load_balancing_coef=0.01: as stated"


def test_the_names_in_the_config_are_those_of_the_registries():
    assert all(find_algorithm(name).name == name for name in ALGORITHMS)
    made = [make_correction(AlgorithmConfig(correction=name)) for name in CORRECTIONS]
    assert [one.func.__name__ for one in made] == [*CORRECTIONS]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_response_alone_is_refused_exactly_where_its_advantage_is_zero(name):
    config = AlgorithmConfig(name=name, group_size=1)
    advantages, _ = make_algorithm(config, 8).advantages([0.0, 1.0, 3.0], "abc", [4, 4, 4])
    if advantages.any():
        config.validate()
    else:
        with pytest.raises(ValueError, match="group_size=1"):
            config.validate()
    assert (name in COMPARE_SIBLINGS) == find_algorithm(name).by_group


def test_defaults_are_valid():
    TrainingConfig().validate()
    AlgorithmConfig().validate()


@given(st.integers(0, 30), st.integers(0, 300), st.sampled_from(["constant", "cosine"]))
def test_the_rate_rises_to_its_peak_and_stays_or_falls_to_zero(warmup, after, schedule):
    total = warmup + after
    rates = [Schedule(2.0, schedule, warmup, total).rate(step) for step in range(total + 2)]
    assert all(0 <= rate <= 2.0 for rate in rates)
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[max(0, warmup - 1)] == 2.0 or (after == 0 and schedule == "cosine")
    if schedule == "constant":
        assert all(rate == 2.0 for rate in rates[warmup:])
    else:
        assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
        assert rates[max(total, warmup + 1)] == pytest.approx(0)


def test_warm_up_is_linear():
    assert [Schedule(1.0, "constant", 4).rate(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_needs_to_know_its_end():
    with pytest.raises(ValueError, match="training.schedule='cosine' needs the number of optimizer steps"):
        Schedule(1.0, "cosine").rate(3)


@given(
    total=st.integers(1, 60),
    warmup=st.integers(0, 20),
    done=st.integers(0, 60),
    more=st.integers(1, 80),
    before=st.sampled_from(["constant", "cosine"]),
)
def test_a_cosine_that_ends_elsewhere_since_a_resume_decays_from_the_last_rate_without_a_jump(
    total, warmup, done, more, before
):
    saved, done = Schedule(2.0, before, warmup, total), min(done, total)
    assert saved.resumed(saved, done, total - done) == saved, "unchanged settings: the same to the bit"
    own = Schedule(2.0, "cosine", warmup, done + more)
    resumed = own.resumed(saved, done, more)
    if resumed == saved or done <= warmup:
        assert resumed in (own, saved)
        return
    last = saved.rate(done - 1)
    rates = [resumed.rate(step) for step in range(done - 1, done + more + 1)]
    assert rates[0] == last and rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(0)
    assert own.resumed(resumed, done, more) == resumed, "a second resume continues it"
    again = replace(own, lr=1.0).resumed(saved, done, more)
    assert again.rate(done) == 1.0 and again.rate(done + more) == pytest.approx(0), "a stated rate is taken"
    assert replace(own, schedule="constant").resumed(saved, done, more).rate(done) == 2.0


def test_with_twice_the_steps_the_rate_no_longer_jumps_from_0_to_half_the_peak():
    saved = Schedule(1.0, "cosine", 0, 100)
    assert Schedule(1.0, "cosine", 0, 200).rate(100) == pytest.approx(0.5)
    resumed = Schedule(1.0, "cosine", 0, 200).resumed(saved, 50, 150)
    assert resumed.rate(50) == pytest.approx(saved.rate(49), rel=1e-3) and resumed.rate(199) < 1e-3
    assert Schedule(1.0, "cosine", 0, 200).resumed(saved, 100, 100).rate(100) <= saved.rate(99)
    assert "decays from 0.516 at optimizer step 49 to 0 at step 200" in resumed.describe() and not saved.describe()
