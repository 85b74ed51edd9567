"""Frames between the pool and its processes: whatever a reward is called with, and whatever it writes itself."""

from __future__ import annotations

import functools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.rewards.wire import START, Result, ScoringStarted, decode_reply, frame, pack_reply, take_frames

take_replies = functools.partial(take_frames, decode=decode_reply)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


@given(error=TEXTS, names=st.lists(TEXTS, max_size=4))
def test_a_start_arrives_whatever_its_fields_are_called(error: str, names: list[str]) -> None:
    started = ScoringStarted(error, names)
    assert list(take_replies(bytearray(pack_reply(START, started)))) == [(START, started)]


@pytest.mark.parametrize("names", [["digits"], ["a", "b"], ["domain"]])
def test_a_start_as_long_as_a_score_is_a_start(names: list[str]) -> None:
    (_, reply), *_ = take_replies(bytearray(pack_reply(START, ScoringStarted("", names))))
    assert reply == ScoringStarted("", names)


@pytest.mark.parametrize(
    ("index", "payload"),
    [
        (0, '["x", null, "", "", 0]'),
        (0, '[NaN, null, "", "", 0]'),
        (0, '[null, "unheard of", "", "", 0]'),
        (0, '[null, "raised", 3, "", 0]'),
        (0, '[null, "raised", "", "", true]'),
        (0, "{}"),
        (0, "[" * 100_000),
        (START, '["", "digits"]'),
        (START, "[null, []]"),
        (START, '["", [3]]'),
    ],
)
def test_what_no_child_sends_is_refused(index: int, payload: str) -> None:
    with pytest.raises(ValueError):
        list(take_replies(bytearray(frame(index, payload.encode()))))


def test_scores_and_failures_arrive_in_order() -> None:
    sent = [(0, Result(0.5, None, "", "", 0.25)), (1, Result(None, "raised", "KeyError: 3", "k", 1.0))]
    buffer = bytearray(b"".join(pack_reply(index, reply) for index, reply in sent))
    rest = pack_reply(2, Result(1.0, None, "", ""))
    assert list(take_replies(buffer + rest[:-1])) == sent
    with pytest.raises(ValueError):
        list(take_replies(bytearray(pack_reply(0, Result(math.nan, None, "", "")))))
