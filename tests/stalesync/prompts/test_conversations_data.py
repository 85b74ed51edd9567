"""Rows of the environments `calculator` and `guess`, and the chats that teach small models to take part."""

from __future__ import annotations

import asyncio
import zlib

from hypothesis import given
from hypothesis import strategies as st

from fusion.environments import Task
from fusion.environments.calculator import Calculator
from fusion.environments.guess import GUESSES, NUMBERS
from fusion.environments.tool_calls import parse
from stalesync.prompts import DataConfig, make_tokenizer
from stalesync.prompts import guess as guess_data
from stalesync.prompts.calculator import CalculatorRows, RepeatRows
from stalesync.prompts.guess import GuessRows

INDICES = st.integers(0, 5000)
TOKENIZER = make_tokenizer(chat=True)


def played(row):
    """What the environment answers to the model's turns of a solution, and the last turn."""

    async def play():
        environment = Calculator()
        await environment.reset(Task(row.prompt, row.answer), 0)
        said = [one["content"] for one in row.fields["solution"] if one["role"] == "assistant"]
        turns = [await environment.step({"content": text, "tool_calls": parse(text, "hermes")}) for text in said]
        return [message["content"] for turn in turns for message in turn.messages], turns[-1]

    return asyncio.run(play())


@given(INDICES, st.integers(0, 3), st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted))
def test_the_solution_of_a_sum_is_what_the_environment_rewards(index, seed, digits):
    config = DataConfig(min_digits=digits[0], max_digits=digits[1], max_terms=3)
    rows = CalculatorRows(config, seed)
    row = rows.row(index)
    answers, last = played(row)
    assert answers == [one["content"] for one in row.fields["solution"] if one["role"] == "tool"] == [row.answer]
    assert last.done and last.reward == 1.0
    assert row == CalculatorRows(config, seed).row(index)
    assert all(digits[0] <= len(number) <= digits[1] for number in row.prompt.removesuffix("=").split("+"))
    (_, longest), *_ = rows.longest()
    assert len(row.prompt) <= len(longest.prompt)


def test_no_held_out_sum_is_trained():
    rows = CalculatorRows(DataConfig(min_digits=1, max_digits=2), 0)
    held_out = {row.prompt for row in rows.evaluation(50)}
    assert not held_out & {rows.row(index).prompt for index in range(500)}
    assert all(zlib.crc32(prompt.encode()) % 10 == 0 for prompt in held_out)


@given(INDICES)
def test_what_is_repeated_is_what_was_read(index):
    row = RepeatRows(1).row(index)
    first, *others = [turn["content"] for turn in row.fields["solution"]]
    assert first in (row.prompt, f":{row.prompt.removesuffix(':')}") and (first[0] == ":") == (row.prompt[-1] == ":")
    assert len({*others}) <= 1


@given(INDICES)
def test_a_game_is_legal_and_answered_truly(index):
    row = GuessRows(DataConfig(), 2).row(index)
    number, turns = int(row.answer), row.fields["solution"]
    assert (guess_data.NUMBERS, guess_data.GUESSES) == (NUMBERS, GUESSES) and row.prompt == "0-15?"
    guesses = [int(turn["content"]) for turn in turns[::2]]
    assert all(0 <= guess < NUMBERS for guess in guesses) and number not in guesses[:-1]
    assert len({*guesses}) == len(guesses)
    assert len(guesses) == GUESSES or guesses[-1] == number
    truth = ["higher" if guess < number else "lower" for guess in guesses[:-1]]
    assert [turn["content"] for turn in turns[1::2]] == truth


def test_numbers_of_games_are_single_tokens_and_those_of_sums_are_digits():
    tokenizer = make_tokenizer(chat=True, words=guess_data.WORDS)
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(NUMBERS))
    assert len(TOKENIZER.encode("12+34=46")) == 8 and len(tokenizer) == len(TOKENIZER)


def test_random_games_that_never_repeat_find_the_number_in_5_of_16():
    games = [GuessRows(DataConfig(), 3).row(index) for index in range(2000)]
    found = sum(row.fields["solution"][-1]["content"] == row.answer for row in games) / len(games)
    assert abs(found - GUESSES / NUMBERS) < 0.05


def test_games_use_all_numbers_alike():
    rows = GuessRows(DataConfig(), 2)
    counts = [0] * NUMBERS
    for index in range(400):
        for turn in rows.row(index).fields["solution"][::2]:
            counts[int(turn["content"])] += 1
    assert min(counts) > sum(counts) / NUMBERS * 0.6
