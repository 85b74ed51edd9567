"""Rewards that score a batch in one call, and those that ask for the other responses of a group."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.rewards import RewardConfig, RewardPool, RewardSample
from fusion.rewards.guard import RewardBatch
from tests.machine import patience

USER = """
import os, sys, time
from pathlib import Path

CALLS = Path(__file__).with_name("calls")

def one(response):
    if response == "raise":
        raise KeyError("no such thing")
    if response == "exit":
        sys.exit(3)
    if response == "hang":
        time.sleep(600)
    if response == "die":
        os._exit(7)
    if response == "memory":
        return float(len(bytearray(1 << 30)))
    return "1.0" if response == "string" else float(response)

def batch(prompts, responses, answers, bonus=None):
    assert type(prompts) is type(responses) is type(answers) is list
    with CALLS.open("a") as file:
        file.write(f"{len(responses)}\\n")
    bonus = bonus or [0.0] * len(responses)
    return [one(response) + (more or 0.0) if response != "string" else "1.0"
            for response, more in zip(responses, bonus, strict=True)]

def short(prompts, responses, answers):
    CALLS.open("a").write("x")
    return [1.0] * (len(responses) - 1)

def single(prompts, responses, answers):
    return 1.0

def as_tensor(prompts, responses, answers):
    class Tensor:
        def tolist(self):
            return [1.5] * len(responses)
    return Tensor()

def rank(prompt, response, answer, other_responses):
    return float(sum(len(response) > len(other) for other in other_responses))

def ranks(prompts, responses, answers, other_responses):
    return [rank("", one, "", others) for one, others in zip(responses, other_responses, strict=True)]
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_reward.py"
    file.write_text(USER)
    return file


def pool_of(file: Path, function: str, **changes) -> RewardPool:
    options = {"workers": 1, "time_limit_s": patience(1.0), "memory_mib": 512, **changes}
    return RewardPool(RewardConfig(path=f"{file}:{function}", **options))


def samples(*responses: str) -> list[RewardSample]:
    return [RewardSample("prompt", response, "answer") for response in responses]


def calls_of(file: Path) -> list[int]:
    return [int(line) for line in file.with_name("calls").read_text().split()]


@given(st.integers(0, 30), st.sets(st.integers(0, 29)), st.lists(st.integers(1, 9), min_size=30, max_size=30))
def test_every_index_is_taken_once_and_those_to_be_scored_alone_by_themselves(count, alone, shares):
    batch, taken = RewardBatch(samples(*["0"] * count)), []
    batch.alone |= alone
    for share in shares:
        if indices := batch.take(8, share):
            assert len(indices) <= min(8, share) and (len(indices) == 1 or not {*indices} & alone)
            taken += indices
    assert taken == [*range(count)]


def test_a_batch_is_scored_in_few_calls_and_fields_are_columns(user_file):
    batch = samples(*map(str, range(100)))
    batch[7].fields["bonus"] = 0.5
    with pool_of(user_file, "batch") as pool:
        outcomes = pool.score(batch)
    assert [outcome.reward for outcome in outcomes] == [number + 0.5 * (number == 7) for number in range(100)]
    assert calls_of(user_file) == [64, 36]


def test_processes_share_a_batch(user_file):
    with pool_of(user_file, "batch", workers=2) as pool:
        assert [outcome.reward for outcome in pool.score(samples(*map(str, range(21))))] == [*range(21)]
    assert sorted(calls_of(user_file)) == [10, 11]


@pytest.mark.parametrize(
    ("bad", "error", "detail"),
    [
        ("raise", "raised", "KeyError: 'no such thing'"),
        ("exit", "raised", "SystemExit: 3"),
        pytest.param("hang", "timeout", "exceeded reward.time_limit_s", marks=pytest.mark.extended),
        ("die", "died", "exited with status 7"),
        ("memory", "memory", "memory limit of 512 MiB"),
    ],
)
def test_a_sample_that_fails_a_call_fails_alone_and_the_others_are_scored(user_file, bad, error, detail):
    with pool_of(user_file, "batch") as pool:
        outcomes = pool.score(samples("0", bad, "2", "3", bad))
        assert [outcome.reward for outcome in outcomes] == [0, None, 2, 3, None]
        assert [outcome.error for outcome in outcomes] == [None, error, None, None, error]
        assert detail in outcomes[1].detail
        assert calls_of(user_file) == [5, 1, 1, 1, 1, 1], "then each by itself"
        assert [outcome.reward for outcome in pool.score(samples("4", "5"))] == [4, 5]
    assert calls_of(user_file)[-1] == 2, "the next batch is one call again"


def test_a_value_that_is_no_number_is_a_failure_of_its_sample(user_file):
    with pool_of(user_file, "batch") as pool:
        outcomes = pool.score(samples("0", "string", "2"))
    assert [outcome.error for outcome in outcomes] == [None, "bad_type", None]
    assert "returned '1.0' (str)" in outcomes[1].detail and calls_of(user_file) == [3]


@pytest.mark.parametrize(
    ("function", "detail"),
    [("short", "returned [1.0, 1.0] (list of 2) for 3 samples"), ("single", "returned 1.0 (float) for 3 samples")],
)
def test_as_many_numbers_as_samples_are_expected(user_file, function, detail):
    with pool_of(user_file, function) as pool:
        outcomes = pool.score(samples("0", "1", "2"))
    assert [(outcome.reward, outcome.error) for outcome in outcomes] == [(None, "bad_type")] * 3
    assert f"{detail}; expected a list of one number for each" in outcomes[0].detail
    assert function == "single" or user_file.with_name("calls").read_text() == "x", "scoring each alone would hide it"


def test_an_array_is_a_list(user_file):
    with pool_of(user_file, "as_tensor") as pool:
        assert [outcome.reward for outcome in pool.score(samples("0", "1"))] == [1.5, 1.5]


@pytest.mark.parametrize("function", ["rank", "ranks"])
def test_a_reward_that_asks_for_the_other_responses_gets_them(user_file, function):
    group = [
        RewardSample("prompt", "a", "", others=["bb", ""]),
        RewardSample("prompt", "bb", "", others=["a", ""]),
        RewardSample("prompt", "", "", fields={"other_responses": ["of the data"]}),
    ]
    with pool_of(user_file, function) as pool:
        assert pool.needs_group and not pool.required_fields
        assert [outcome.reward for outcome in pool.score(group)] == [1.0, 2.0, 0.0]


def test_a_reward_that_does_not_ask_gets_no_other_responses(user_file):
    with pool_of(user_file, "batch") as pool:
        assert not pool.needs_group
