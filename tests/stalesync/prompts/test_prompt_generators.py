import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.rewards.counting import counting
from stalesync.prompts import DataConfig, PromptSource, make_tokenizer, solution_ids
from stalesync.prompts.addition import AdditionRows
from stalesync.prompts.counting import HELD_OUT, CountingRows
from stalesync.prompts.rows import Row, Rows
from stalesync.prompts.tokenizer import PLACES, VOCABULARY
from stalesync.prompts.worked import WorkedRows, worked_problem


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def value_of(placed: str) -> int:
    """`b4a7` as 47, checking that the letters run down to `a`."""
    pairs = re.findall(r"([a-j])(\d)", placed)
    assert "".join(a + b for a, b in pairs) == placed
    assert [a for a, _ in pairs] == list(reversed(PLACES[: len(pairs)]))
    return int("".join(digit for _, digit in pairs))


def test_the_tokenizer_folder_round_trips(tokenizer):
    assert len(tokenizer) == len(VOCABULARY) == 32
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token) == (0, 1, None)
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choices(VOCABULARY[2:], k=rng.randrange(60)))
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) and tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, 1, 0, 0], skip_special_tokens=True) == text
    assert tokenizer.decode(range(32)) == "".join(VOCABULARY)


def test_the_tokenizer_refuses_what_it_cannot_spell(tokenizer):
    with pytest.raises(Exception, match="UNK"):
        tokenizer("3+x=")


def test_addition_is_the_whole_table():
    rows = AdditionRows(DataConfig(), 0)
    problems = {rows.row(i).prompt: rows.row(i).answer for i in rows.indices}
    assert problems == {f"{a}+{b}=": str(a + b) for a in range(10) for b in range(10)}
    assert rows.evaluation(250) == rows.evaluation(250) and len({r.prompt for r in rows.evaluation(100)}) == 100


def test_counting_holds_digits_out_and_its_solutions_end_anywhere():
    rows, again = (CountingRows(DataConfig(max_digits=400), 0) for _ in range(2))
    held_out, trained = again.evaluation(20), [rows.row(index) for index in range(500)]
    assert {row.prompt for row in held_out} == {f"{digit}=" for digit in HELD_OUT}
    assert {row.prompt for row in trained} == {f"{digit}=" for digit in range(10) if digit not in HELD_OUT}
    assert rows.evaluation(20) == held_out and rows.row(7) == again.row(7)
    lengths = [len(row.fields["solution"]) for row in trained]
    assert min(lengths) < 20 and max(lengths) > 380 and max(lengths) <= 400
    for row, length in zip(trained, lengths, strict=True):
        assert row.answer == "400" and counting(row.prompt, row.fields["solution"], row.answer) == length / 400


def test_counting_is_the_share_of_the_digits_asked_for_that_follow_from_the_one_before():
    assert counting("0=", "123234", "6") == 5 / 6, "a slip costs one digit"
    assert counting("0=", "123", "6") == 0.5 and counting("9=", "0123456789", "1") == 1
    assert counting("0=", "12a45x", "6") == 3 / 6 and counting("0=", "", "6") == 0
    assert counting("0=", "1\u0662", "2") == 0.5, "a digit of another script is none"


@pytest.mark.parametrize("answer", ["", "0", "-3", "1.5", "six", "\u0663"])
def test_counting_refuses_an_answer_that_is_no_number_of_digits(answer):
    with pytest.raises(ValueError, match="expected a number of digits"):
        counting("0=", "123", answer)


def test_one_worked_problem_by_hand():
    row = worked_problem([47, 86])
    assert row.prompt == "b4a7+b8a6="
    assert row.fields["solution"] == "a:0+7=07+6=13,a3;b:1+4=05+8=13,b3;#1b3a3"
    assert row.answer == "#1b3a3"


@given(seed=st.integers(0, 9), index=st.integers(0, 10**6), sizes=st.tuples(st.integers(1, 10), st.integers(1, 10)))
def test_working_and_answer_of_a_worked_problem_are_right(seed, index, sizes):
    rows = WorkedRows(DataConfig(min_digits=min(sizes), max_digits=max(sizes), max_terms=4), seed)
    row = rows.row(index)
    assert row == WorkedRows(DataConfig(min_digits=min(sizes), max_digits=max(sizes), max_terms=4), seed).row(index)
    numbers = [value_of(number) for number in row.prompt.removesuffix("=").split("+")]
    digits, terms = row.fields["digits"], row.fields["terms"]
    assert len(numbers) == terms and min(sizes) <= digits <= max(sizes)
    assert all(len(str(number)) == digits for number in numbers)
    working, _, answer = row.fields["solution"].partition("#")
    assert row.answer == "#" + answer and "#" not in answer
    assert int(answer[0]) * 10**digits + value_of(answer[1:]) == sum(numbers)
    carry = 0
    for place, step in enumerate(working.removesuffix(";").split(";")):
        match = re.fullmatch(rf"{PLACES[place]}:(\d)((?:\+\d=\d\d)+),{PLACES[place]}(\d)", step)
        assert match and int(match[1]) == carry
        total = carry
        for digit, shown in re.findall(r"\+(\d)=(\d\d)", match[2]):
            total += int(digit)
            assert int(shown) == total
        assert int(match[3]) == total % 10
        carry = total // 10
    assert len(row.fields["solution"]) + 1 == digits * (5 * terms + 7) + 2 * digits + 3


def test_answers_grow_with_the_problem_from_40_to_300_tokens(tokenizer):
    lengths = {}
    for terms in (2, 3, 4):
        for digits in range(2, 11):
            row = worked_problem([10**digits - 1] * terms)
            lengths[terms, digits] = len(tokenizer(row.fields["solution"])["input_ids"]) + 1
    assert min(lengths.values()) == lengths[2, 2] == 41 and max(lengths.values()) == lengths[4, 10] == 293
    assert all(lengths[t, d] < lengths[t, d + 1] for t in (2, 3, 4) for d in range(2, 10))
    assert all(lengths[t, d] < lengths[t + 1, d] for t in (2, 3) for d in range(2, 11))


@settings(max_examples=5)
@given(seed=st.integers(0, 100))
def test_evaluation_is_held_out_and_repeatable(tokenizer, seed):
    source = PromptSource(DataConfig(source="worked_arithmetic", max_digits=2), tokenizer, seed)
    held_out = source.evaluation(100)
    assert held_out == source.evaluation(100) and [p.id for p in held_out[:2]] == ["eval-0", "eval-1"]
    assert not {p.text for p in held_out} & {p.text for p in source.next(2000)}


def test_solutions_end_with_the_end_token(tokenizer):
    for name in ("addition", "worked_arithmetic"):
        for prompt in PromptSource(DataConfig(source=name), tokenizer, 0).next(20):
            ids = solution_ids(prompt, tokenizer)
            assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1
            assert tokenizer.decode(ids, skip_special_tokens=True).endswith(prompt.answer)
            assert tokenizer.decode(prompt.ids) == prompt.text


class Squares(Rows):
    """A user's own generator, without end."""

    def __init__(self, config, seed):
        self.largest = config.prompts_per_step

    def row(self, index):
        return Row(f"{index % self.largest}+0=", str(index % self.largest))

    def name(self, index):
        return f"square {index}"

    def evaluation(self, count):
        return [self.row(index) for index in range(count)]

    def longest(self):
        return [("the largest square", self.row(self.largest - 1))]


class Asking(Squares):
    def longest(self):
        return [("a question", Row("what?", "1"))]


class Unbounded(Rows):
    """Lacks two methods."""

    def row(self, index):
        return Row(f"{index}+0=", str(index))

    def evaluation(self, count):
        return []


def test_a_generator_of_ones_own_is_found_by_its_path(tokenizer):
    config = DataConfig(source=f"{__name__}:Squares", prompts_per_step=11)
    source = PromptSource(config, tokenizer, 0)
    assert [prompt.text for prompt in source.next(2)] == [
        "0+0=",
        "1+0=",
    ] and source.num_rows is source.rows.digest is None
    with pytest.raises(ValueError, match="the largest square: a prompt of 5 tokens is longer than .*_length=4"):
        PromptSource(replace(config, max_prompt_length=4), tokenizer, 0)
    with pytest.raises(ValueError, match="the tokenizer refuses the prompt: .*UNK"):
        PromptSource(replace(config, source=f"{__name__}:Asking"), tokenizer, 0)
    lacking = f"data.source={__name__}:Unbounded: the class lacks the methods longest, name of Rows"
    with pytest.raises(ValueError, match=lacking):
        PromptSource(replace(config, source=f"{__name__}:Unbounded"), tokenizer, 0)
    with pytest.raises(ValueError, match="expected a text or a chat as prompt, and a text as answer: Row.*answer=2"):
        Row("1+1=", 2)
    with pytest.raises(ValueError, match=f"data.source={__name__}:Row: expected a subclass of stalesync.prompts.rows"):
        PromptSource(replace(config, source=f"{__name__}:Row"), tokenizer, 0)


def test_the_reward_takes_the_solutions():
    from fusion.rewards.arithmetic import arithmetic

    for rows in (AdditionRows(DataConfig(), 0), WorkedRows(DataConfig(min_digits=2, max_digits=6, max_terms=3), 0)):
        for index in range(50):
            row, other = rows.row(index), rows.row(index + 1)
            assert arithmetic(row.prompt, row.fields["solution"], row.answer) == 1.0
            expected = float(other.answer == row.answer)
            assert arithmetic(row.prompt, other.fields["solution"], row.answer) == expected
