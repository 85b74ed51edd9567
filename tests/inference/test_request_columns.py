"""Requests arrive at every rank of an engine as they were submitted, and what they share is sent once."""

from __future__ import annotations

import json
import pickle

from hypothesis import given
from hypothesis import strategies as st

from fusion.inference import Request, SamplingParams
from fusion.inference.control import Orders
from fusion.inference.request_columns import Requests, from_columns, to_columns

TOKENS = st.lists(st.integers(0, 9), max_size=4).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 9),
    stop_token_ids=st.none() | TOKENS,
)


@st.composite
def some_requests(draw) -> list[Request]:
    """Requests of which several share their prompts, responses and parameters."""
    shared = st.sampled_from
    prompts, responses = (draw(st.lists(TOKENS, min_size=1, max_size=3)) for _ in range(2))
    groups, params = draw(st.lists(st.text(max_size=3), min_size=1)), draw(st.lists(PARAMS, min_size=1, max_size=3))
    rewards = st.lists(st.none() | st.floats(-9, 9), max_size=3).map(tuple)
    last = draw(st.lists(st.tuples(st.text(max_size=3), rewards), min_size=1, max_size=3))
    one = st.builds(
        Request,
        id=st.text(max_size=3),
        prompt=shared(prompts),
        params=shared(params),
        group=shared(groups),
        response=shared(responses),
        chunk_tokens=st.integers(0, 9),
        exact_tokens=st.integers(0, 9),
        earlier=st.text(max_size=3),
        kv_rank=st.none() | st.integers(0, 3),
        priority=st.integers(0, 1),
        turns=st.booleans(),
        observation=st.integers(0, 9),
        turn_start=st.integers(0, 9),
        last_rewards=shared(last),
    )
    return draw(st.lists(one, max_size=6))


@given(some_requests())
def test_requests_survive_their_columns_and_share_what_they_shared(requests):
    decoded = from_columns(json.loads(json.dumps(to_columns(requests))))
    assert decoded == requests
    for name in ("prompt", "params", "last_rewards"):
        objects = [{id(getattr(one, name)) for one in some} for some in (requests, decoded)]
        assert len(objects[1]) <= len(objects[0])


@given(some_requests())
def test_requests_are_pickled_as_they_are(requests):
    columns = Requests(to_columns(requests))
    assert len(columns) == len(requests)
    assert pickle.loads(pickle.dumps(columns)) == list(columns) == requests


@given(
    submit=some_requests(),
    forget=st.lists(st.text(max_size=3)),
    abort=st.lists(st.text(max_size=3)),
    abort_all=st.booleans(),
    pause=st.booleans(),
    version=st.none() | st.integers(0, 9),
)
def test_orders_survive_their_message(**orders):
    assert Orders.decode(Orders(**orders).encode()) == Orders(**orders)


def test_a_groups_prompt_is_sent_once():
    prompt, params = tuple(range(1000)), SamplingParams()
    one = [Request("0", prompt, params, group="g")]
    group = [Request(str(member), prompt, params, group="g") for member in range(64)]
    sizes = [len(Orders(submit=requests).encode()) for requests in (one, group)]
    assert sizes[1] < 2 * sizes[0]
