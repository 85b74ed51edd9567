"""Whole runs of a model that thinks, whose template removes its thoughts before what the user says next: conversations
go on in branches, bitwise again, killed and resumed."""

import time
from collections import Counter

import pytest
from transformers import AutoTokenizer

from tests.stalesync.conversations import make_chatting_model
from tests.stalesync.runs import begin, kill, rows_of, train, wait_until
from tests.stalesync.stopped_run import BRANCHES
from tests.stalesync.test_conversations_run import (
    AGAIN,
    OPTIONS,
    STALE,
    assert_kills_change_nothing,
    completed,
    endings_of,
    environment,
    rows_of_groups,
    samples_of,
)
from tests.stalesync.test_killed import _newest, assert_same_weights

MAX_TOKENS = 200


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking")
    make_chatting_model(folder, thinks=True)
    return folder


@pytest.fixture(scope="module")
def whole(thinking, tmp_path_factory):
    """A synchronous run that nothing disturbs."""
    return completed(tmp_path_factory.mktemp("whole"), "Env", thinking, *AGAIN)


def assert_branched(run, thinking):
    """Branches begin where a thought is removed, within the budget of tokens, and nothing is left in the queue."""
    tokenizer = AutoTokenizer.from_pretrained(thinking)
    several = 0
    for sample in samples_of(run):
        messages, ends = sample["messages"], sample.get("branches", [])
        for start, end in zip([0, *ends][: len(ends)], ends, strict=True):
            said = [message["content"] for message in messages[start:end] if message["role"] == "assistant"]
            assert any("</think>" in text for text in said) and messages[end - 1]["role"] == "user"
            prompt = tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=True)
            assert "</think>" not in prompt, "the model does not read its earlier thoughts"
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        assert all(text in sample["response"] for text in said), "a reward sees the whole conversation"
        several += len(ends) > 1
    assert several > 1
    last = rows_of(run)[-1]
    assert last["env/num_branches/max"] == 3 and last["distqueue/ended/dropped:branch"] > 10
    assert last["response_length/max"] <= MAX_TOKENS
    for row in rows_of_groups(run):
        assert len(row["response_tokens"]) == 4, "a group counts conversations"


def test_conversations_of_a_run_go_on_in_branches_of_which_the_queue_keeps_none(thinking, whole):
    assert_branched(whole, thinking)
    assert rows_of(whole)[-1]["distqueue/rows"] == 0


@pytest.mark.extended
def test_at_staleness_0_a_run_in_branches_is_bitwise_the_same_again(thinking, whole, tmp_path):
    again = completed(tmp_path, "Slow", thinking, *AGAIN)  # seconds have no effect
    assert_same_weights(again, whole)
    assert samples_of(again) == samples_of(whole)
    evaluations = [(run / "evaluations.jsonl").read_text() for run in (again, whole)]
    assert evaluations[0] == evaluations[1] and '"failed": 0' in evaluations[0]


@pytest.mark.extended
def test_a_run_that_is_killed_at_each_boundary_of_a_branch_is_bitwise_one_that_is_not(thinking, whole, tmp_path):
    assert_kills_change_nothing(thinking, whole, tmp_path, BRANCHES)


@pytest.mark.extended
def test_a_stale_run_that_is_killed_between_branches_loses_no_conversation_and_trains_none_twice(thinking, tmp_path):
    options, folder = [*OPTIONS, environment(tmp_path, "Slow"), *STALE], tmp_path / "run"
    run = begin(thinking, tmp_path, *options)
    wait_until(run, 120, lambda: folder.exists() and _newest(folder) >= 2)
    time.sleep(0.4)
    kill(run)
    done = train(thinking, tmp_path, *options, "run.resume=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_branched(folder, thinking)
    assert Counter(endings_of(folder).values()) == {"trained": 8 * 4}
    recorded = Counter((row["prompt"], row["response"]) for row in samples_of(folder))
    assert {*recorded.values()} == {1}, "a sample was trained twice"


@pytest.mark.extended
def test_an_engine_that_is_killed_between_branches_loses_no_conversation(thinking, tmp_path):
    run = completed(
        tmp_path,
        "Killing",
        thinking,
        "cluster.npus=3",
        "parallel=single",
        "fusion=separate",
        "fusion.infer_cards=2",
        "stalesync.max_staleness=1",
        "run.eval_prompts=0",
        "run.steps=6",
    )
    assert Counter(endings_of(run).values()) == {"trained": 6 * 4}
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows_of(run)) == 1
    assert rows_of(run)[-1]["env/num_branches/max"] > 1
