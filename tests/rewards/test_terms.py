"""Rewards of several terms: what is refused, how they add up, and what fails."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.rewards import RewardConfig, RewardOutcome, RewardPool, RewardSample, TermSpec, combine, length_term
from fusion.rewards.terms import check_term_fields, start_terms

LENGTH = {"reward": "length", "free_tokens": 10, "max_tokens": 20}


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ("math", "reward.terms='math': expected a list"),
        ([3], r"reward.terms\[0\]=3: expected a reward, or reward and other fields of name, weight"),
        ([{"name": "a"}], r"reward.terms\[0\]=.*: expected a reward"),
        ([{"reward": "math", "wieght": 1}], r"reward.terms\[0\]: unknown field 'wieght'.*; did you mean 'weight'\?"),
        (["maths"], r"reward.terms\[0\].reward='maths': expected arithmetic, counting, math, format, length or file"),
        (["math", "math"], r"reward.terms\[1\].name='math': expected another name than those of arithmetic, math"),
        (["arithmetic"], r"reward.terms\[0\].name='arithmetic': expected another name than those of arithmetic"),
        (["no.py:f"], r"reward.terms\[0\].reward='no.py:f': .*expected an existing file"),
        ([{"reward": "math", "weight": float("nan")}], r"reward.terms\[0\].weight=nan: expected a number"),
        (["format"], r"reward.terms\[0\].pattern=null: expected a regular expression"),
        ([{"reward": "format", "pattern": "("}], r"reward.terms\[0\].pattern='\(': expected a regular expression"),
        ([{"reward": "math", "pattern": "x"}], r"reward.terms\[0\].pattern='x': expected null"),
        (["length"], r"reward.terms\[0\].free_tokens=null: expected a whole number"),
        ([LENGTH | {"max_tokens": 10}], r"reward.terms\[0\].max_tokens=10: expected a whole number of at least 11"),
        ([{"reward": "math", "max_tokens": 9}], r"reward.terms\[0\].max_tokens=9: expected null"),
    ],
)
def test_a_wrong_term_is_refused_by_key(terms, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(terms=terms).validate()


def test_a_term_has_the_name_of_its_reward_or_its_function_and_the_weight_1(tmp_path):
    (tmp_path / "mine.py").touch()
    path = f"{tmp_path / 'mine.py'}:polite"
    config = RewardConfig(terms=[path, "math", LENGTH | {"name": "brief", "weight": 0.5}])
    config.validate()
    assert config.term_specs() == [
        TermSpec(path, "polite"),
        TermSpec("math", "math"),
        TermSpec("length", "brief", 0.5, free_tokens=10, max_tokens=20),
    ]
    assert [config.title, RewardConfig(path="a/b.py:score").title] == ["arithmetic", "score"]


@given(st.integers(0, 50), st.integers(0, 20), st.integers(1, 20))
def test_a_length_costs_nothing_first_and_then_up_to_1(tokens, free, more):
    term = length_term(tokens, free, free + more)
    assert -1 <= term <= 0 and (term == 0) == (tokens <= free) and (term == -1) == (tokens >= free + more)
    assert length_term(tokens + 1, free, free + more) <= term


outcomes = st.one_of(
    st.floats(-1, 1).map(lambda reward: RewardOutcome(reward, seconds=0.5)),
    st.sampled_from(["raised", "timeout"]).map(lambda error: RewardOutcome(None, error, "why")),
)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[outcomes] * n), max_size=5)), st.data())
def test_a_total_is_the_weighted_sum_and_fails_if_and_only_if_a_part_failed(rows, data):
    size = len(rows[0]) if rows else 1
    weights = data.draw(st.lists(st.floats(-2, 2), min_size=size, max_size=size))
    parts = {f"t{i}": (weight, [row[i] for row in rows]) for i, weight in enumerate(weights)}
    for row, total in zip(rows, combine(parts), strict=True):
        failed = [(f"t{i}", one) for i, one in enumerate(row) if one.reward is None]
        if failed:
            name, first = failed[0]
            assert (total.reward, total.error, total.detail) == (None, first.error, f"the term '{name}': why")
        else:
            expected = sum(weight * one.reward for weight, one in zip(weights, row, strict=True))
            assert total.reward == pytest.approx(expected) and total.error is None
            assert total.terms == {f"t{i}": one.reward for i, one in enumerate(row)}


def test_a_total_beyond_float32_fails_the_sample_by_name():
    one, other = [RewardOutcome(3e38), RewardOutcome(-3e38)], [RewardOutcome(3e38), RewardOutcome(3e38)]
    beyond, fits = combine({"a": (1.0, one), "b": (1.0, other)})
    assert (beyond.reward, beyond.error) == (None, "bad_type") and "'b': 3e+38} is 6e+38, beyond" in beyond.detail
    assert fits.reward == 0.0


def test_a_format_is_matched_in_a_guarded_process_as_a_whole_over_lines():
    config = RewardConfig(workers=1, time_limit_s=2.0, terms=[{"reward": "format", "pattern": "<a>(.|b)*</a>!?"}])
    spec = config.term_specs()[0].spec(config)
    responses = ["<a>x\ny</a>", "<a>x</a> more", "x", "<a>" + 50 * "b"]
    with RewardPool(config, spec) as pool:
        found = pool.score([RewardSample("p", response, "answer", {"answer": "field"}) for response in responses])
    assert [outcome.reward for outcome in found] == [1.0, 0.0, 0.0, None]
    assert found[-1].error == "timeout", "an expression that takes forever costs its own sample"


def test_what_a_term_lacks_is_refused_with_its_number_and_name(tmp_path):
    (file := tmp_path / "mine.py").write_text("def levelled(prompt, response, answer, level): return float(level)")
    pools = []

    def start(config, spec):
        pools.append(RewardPool(config, spec))
        return pools[-1]

    try:
        config = RewardConfig(workers=1, terms=[LENGTH, f"{file}:levelled"])
        terms = start_terms(config, start)
        check_term_fields(terms, {"level"})
        with pytest.raises(ValueError, match=r"reward.terms\[1\] .levelled.: .*requires the field 'level'"):
            check_term_fields(terms, {"unit"})
        with pytest.raises(ValueError, match=r"reward.terms\[0\] .absent.: .*the file defines no function 'absent'"):
            start_terms(RewardConfig(workers=1, terms=[f"{file}:absent"]), start)
    finally:
        for pool in pools:
            pool.close()
