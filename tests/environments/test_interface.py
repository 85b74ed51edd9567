"""What is checked of an environment's turns, and which observations are equal."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.environments.interface import EnvironmentFailed, Stepped, Turn, checked_start, checked_turn, digest_of
from fusion.environments.wire import Reply, decode_reply, pack_reply
from fusion.rewards.wire import HEADER, MAX_REPLY_BYTES

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "tool"]), "content": TEXTS}, optional={"name": TEXTS}
    ),
    max_size=3,
)
REWARDS = st.one_of(st.none(), st.floats(-1e38, 1e38), st.integers(-9, 9), st.booleans())
TURNS = st.builds(Turn, MESSAGES, st.booleans(), REWARDS)


@given(TURNS)
def test_a_turn_that_is_accepted_arrives_as_it_is(turn):
    try:
        checked = checked_turn(turn)
    except EnvironmentFailed as failed:
        assert failed.kind == "bad_turn" and not turn.messages and not turn.done
        return
    frame = pack_reply(5, Reply(None, "", 0.5, checked.messages, checked.done, checked.reward))
    reply = decode_reply(5, frame[HEADER.size :])
    assert isinstance(reply, Reply) and reply.turn == checked and reply.seconds == 0.5
    assert reply.stepped("g/0") == Stepped("g/0", checked, digest_of(checked), seconds=0.5, tools=[])


def test_a_conversation_may_begin_with_turns_of_the_assistant_but_not_end_so():
    chat = [{"role": role, "content": role} for role in ("developer", "user", "assistant", "tool")]
    begun, tools = checked_start(chat, [])
    reply = decode_reply(5, pack_reply(5, Reply(None, "", 0.5, begun.messages, tools=tools))[HEADER.size :])
    assert isinstance(reply, Reply) and [*reply.turn.messages] == chat
    for refused, said in (
        (lambda: checked_start(chat[:3], []), "is the assistant's"),
        (lambda: checked_turn(begun), "of role 'developer'"),
    ):
        with pytest.raises(EnvironmentFailed, match=said) as failed:
            refused()
        assert failed.value.kind == "bad_turn"


@given(TURNS, TURNS)
def test_equal_digests_mean_equal_observations(one, other):
    texts = [json.dumps([*turn.messages, turn.done, turn.reward], sort_keys=True) for turn in (one, other)]
    digests = [digest_of(turn) for turn in (one, other)]
    assert (digests[0] == digests[1]) == (texts[0] == texts[1])


@pytest.mark.parametrize(
    "values",
    [
        ["unheard of", "", 0.1, [], False, None, []],
        [None, 3, 0.1, [], True, None, []],
        [None, "", "x", [], True, None, []],
        [None, "", 0.1, [], 1, None, []],
        [None, "", 0.1, [], False, None, []],
        [None, "", 0.1, [{"role": "assistant", "content": ""}], False, None, []],
        [None, "", 0.1, [{"role": ["user"], "content": ""}], False, None, []],
        [None, "", 0.1, [{"role": "user", "content": "", "tool_calls": ""}], False, None, []],
        [None, "", 0.1, [], True, math.nan, []],
        [None, "", 0.1, [], True, None, [3]],
        ["died", "", 0.1, [{"role": "user", "content": ""}], False, None, []],
        [None, ""],
        {},
    ],
)
def test_what_no_child_writes_is_refused(values):
    with pytest.raises(ValueError):
        decode_reply(5, json.dumps(values).encode())


def test_a_reply_that_is_too_long_is_a_failure_of_its_conversation():
    frame = pack_reply(5, Reply(None, "", 0.5, [{"role": "user", "content": "x" * MAX_REPLY_BYTES}]))
    reply = decode_reply(5, frame[HEADER.size :])
    assert isinstance(reply, Reply) and reply.failure == "bad_turn" and f"at most {MAX_REPLY_BYTES:,}" in reply.detail
