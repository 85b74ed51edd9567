"""What enters an engine: it is computed, or refused by name before any rank hears of it."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion.inference import Request, SamplingParams, validation
from fusion.inference.control import Orders
from fusion.inference.validation import checked_requests
from tests.inference.engines import engine, tokens
from tests.rollouts import rollout_config

VOCABULARY = 32
GOOD = Request("r", (3, 4, 5), SamplingParams(max_tokens=6, stop_token_ids=()), group="g", response=(7,), kv_rank=0)

REFUSED = [
    (dict(prompt=(3, 32)), r"prompt\[1\]=32: expected token ids, whole numbers in \[0, 31\]"),
    (dict(prompt=(3, -1)), r"prompt\[1\]=-1"),
    (dict(prompt=(3, 4.0)), r"prompt\[1\]=4.0"),
    (dict(prompt=(3, True)), r"prompt\[1\]=True"),
    (dict(prompt=(3, np.float32(4))), r"prompt\[1\]="),
    (dict(prompt=np.array([[3, 4]])), r"prompt\[0\]=\[3, 4\]"),
    (dict(prompt=np.array([True, False])), r"prompt\[0\]=True"),
    (dict(prompt=np.array(3)), "prompt=3: expected a sequence of token ids"),
    (dict(prompt="abc"), "prompt='abc': expected a sequence of token ids"),
    (dict(prompt=b"abc"), "prompt=b'abc': expected a sequence of token ids"),
    (dict(prompt=None), "prompt=None"),
    (dict(prompt={3: 4}), "prompt={3: 4}"),
    (dict(response=(99,)), r"response\[0\]=99"),
    (dict(response=(2.5,)), r"response\[0\]=2.5"),
    (dict(response=(2**70,)), r"response\[0\]=1180591620717411303424"),
    (dict(response=(1,) * 6), "the response has 6 tokens already"),
    (dict(chunk_tokens=-1), r"chunk_tokens=-1: expected a whole number in \[0, 1000000000\]"),
    (dict(chunk_tokens=1.0), "chunk_tokens=1.0"),
    (dict(exact_tokens=2.0), "exact_tokens=2.0"),
    (dict(exact_tokens=True), "exact_tokens=True"),
    (dict(kv_rank=-1), "kv_rank=-1"),
    (dict(kv_rank="0"), "kv_rank='0'"),
    (dict(priority=-1), r"priority=-1: expected a whole number in \[0, 1000000000\]"),
    (dict(priority=None), "priority=None"),
    (dict(last_rewards=None), r"last_rewards=None: expected \(group, rewards\)"),
    (dict(last_rewards=("e0", (1.0,), 2)), "last_rewards="),
    (dict(last_rewards=("e0", 1.0)), "last_rewards="),
    (dict(last_rewards=(3, (1.0,))), r"last_rewards\[0\]=3: expected text"),
    (dict(last_rewards=("e0", (1.0, math.nan))), "last_rewards has nan: expected a finite number, or None"),
    (dict(last_rewards=("e0", (True,))), "last_rewards has True"),
    (dict(last_rewards=("e0", ("1",))), "last_rewards has '1'"),
    (dict(group=3), "group=3: expected text"),
    (dict(turns=1), "turns=1: expected true or false"),
    (dict(observation=1), "observation=1, turn_start=0: expected fewer than the 1 tokens of the response, and all"),
    (dict(response=(7, 8), observation=1, turn_start=1), "observation=1, turn_start=1"),
    (dict(turn_start=2), "observation=0, turn_start=2"),
    (dict(observation=None), "observation=None"),
    (dict(group="\ud800"), "group="),
    (dict(earlier=None), "earlier=None"),
    (dict(params=None), "params=None: expected SamplingParams"),
]
REFUSED_PARAMS = [
    (dict(temperature=1e-40), r"temperature=1e-40: expected 0 \(greedy decoding\) or a number in \[1e-05, 100000\]"),
    (dict(temperature=1e300), "temperature=1e\\+300"),
    (dict(temperature=-1), "temperature=-1"),
    (dict(temperature=math.nan), "temperature=nan"),
    (dict(temperature=True), "temperature=true"),
    (dict(temperature=10**400), "temperature=1000"),
    (dict(temperature="1"), "temperature='1'"),
    (dict(top_k=1.5), "top_k=1.5: expected a whole number"),
    (dict(top_k=-1), "top_k=-1"),
    (dict(top_k=True), "top_k=true"),
    (dict(top_p=0), r"top_p=0.0: expected a number in \(0, 1\]"),
    (dict(top_p=1.01), "top_p=1.01"),
    (dict(top_p=None), "top_p=null"),
    (dict(min_p=-0.1), "min_p=-0.1"),
    (dict(max_tokens=0), "max_tokens=0"),
    (dict(max_tokens=4.0), "max_tokens=4.0"),
    (dict(max_tokens=10**5000), "max_tokens=a whole number of thousands of digits"),
    (dict(stop_token_ids=(32,)), r"params.stop_token_ids\[0\]=32"),
    (dict(stop_token_ids=(1.0,)), r"params.stop_token_ids\[0\]=1.0"),
    (dict(stop_token_ids=7), "params.stop_token_ids=7"),
    (dict(stop_token_ids="</s>"), "params.stop_token_ids='</s>'"),
]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(replace(GOOD, **fields), message) for fields, message in REFUSED]
    + [(replace(GOOD, params=replace(GOOD.params, **fields)), message) for fields, message in REFUSED_PARAMS],
)
def test_a_wrong_field_is_refused_with_its_request_value_and_range(wrong, message):
    with pytest.raises(ValueError, match="request .*" + message) as caught:
        checked_requests([wrong], VOCABULARY)
    assert "'r'" in str(caught.value)


def test_numbers_and_tokens_of_numpy_and_torch_become_pythons():
    for prompt in (np.array([3, 4, 5]), torch.tensor([3, 4, 5]), [3, np.int64(4), 5], range(3, 6)):
        params = SamplingParams(
            temperature=np.float64(0.5),
            top_k=np.int32(7),
            top_p=Fraction(1, 2),
            max_tokens=np.uint8(6),
            stop_token_ids=[np.int64(9)],
        )
        (checked,) = checked_requests([Request("r", prompt, params, response=[np.int16(7)])], VOCABULARY)
        assert (checked.prompt, checked.response, checked.params.stop_token_ids) == ((3, 4, 5), (7,), (9,))
        assert {type(token) for token in (*checked.prompt, *checked.response)} == {int}
        plain = checked.params
        assert (plain.temperature, plain.top_k, plain.top_p, plain.max_tokens) == (0.5, 7, 0.5, 6)
        assert [type(value) for value in (plain.temperature, plain.top_k, plain.top_p)] == [float, int, float]
        assert Orders.decode(Orders(submit=[checked]).encode()).submit == [checked]
        hash(plain)
    assert checked_requests([GOOD], VOCABULARY)[0] is GOOD, "what is right is not copied"


def test_what_requests_share_is_checked_once_and_what_they_do_not_share_each(monkeypatch):
    checked = []
    for name in ("_tokens", "_params"):
        check = getattr(validation, name)
        monkeypatch.setattr(validation, name, lambda *args, check=check: checked.append(args[1]) or check(*args))
    siblings = [replace(GOOD, id=str(member)) for member in range(8)]
    assert checked_requests([*siblings, replace(GOOD, prompt=(3, *GOOD.prompt[1:]))], VOCABULARY) == [
        *siblings,
        GOOD,
    ]
    params = GOOD.params
    assert checked == [GOOD.prompt, GOOD.response, params, params.stop_token_ids, GOOD.prompt]
    with pytest.raises(ValueError, match=r"request '9': prompt\[2\]=99"):
        checked_requests([*siblings, replace(GOOD, id="9", prompt=(3, 4, 99))], VOCABULARY)
    with pytest.raises(ValueError, match="request '9': prompt=SamplingParams"):
        checked_requests([*siblings, replace(GOOD, id="9", prompt=GOOD.params)], VOCABULARY)
    with pytest.raises(ValueError, match="request '9': params.top_p=2"):
        checked_requests([*siblings, replace(GOOD, id="9", params=replace(GOOD.params, top_p=2.0))], VOCABULARY)


def test_more_candidates_than_tokens_are_all_tokens():
    wide = replace(GOOD, params=replace(GOOD.params, top_k=2**70))
    assert checked_requests([wide], VOCABULARY)[0].params.top_k == VOCABULARY


@pytest.mark.parametrize("temperature", [1e-40, 1e9, 10**400])
def test_the_config_has_the_same_bounds(temperature):
    with pytest.raises(ValueError, match="rollout.sampling.temperature=.*expected 0"):
        rollout_config(temperature=temperature).validate()


@pytest.mark.parametrize("params", [*REFUSED_PARAMS[:3], (dict(temperature=0.7), "")])
def test_nothing_is_sent_to_the_ranks_before_all_requests_are_checked(params):
    made = engine()
    wrong = replace(GOOD, params=replace(GOOD.params, **params[0]), prompt=(3, 32))
    with pytest.raises(ValueError):
        made.submit([replace(GOOD, id="first"), wrong])
    assert not made.control.inbox.take()


def test_an_id_is_submitted_once():
    made = engine()
    with pytest.raises(ValueError, match="request 'r': submitted twice"):
        made.submit([GOOD, replace(GOOD, id="s"), GOOD])
    assert made.run() == []


@pytest.mark.parametrize("call", ["abort", "forget"])
@pytest.mark.parametrize("ids", ["r1", [3], [None], [np.int64(3)], ["\ud800"]], ids=repr)
def test_a_control_call_with_wrong_ids_is_refused_where_it_is_made(call, ids):
    made = engine()
    with pytest.raises(ValueError, match="ids="):
        getattr(made, call)(ids)
    assert not made.control.inbox.take()


def test_a_policy_version_is_a_natural_number():
    made = engine()
    for wrong in (-1, 1.0, True, "1"):
        with pytest.raises(ValueError, match="version="):
            made.adopt(wrong)
    made.adopt(np.int64(3))
    orders = made.control.inbox.take()
    assert orders.version == 3 and Orders.decode(orders.encode()).version == 3


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.sampled_from([1e-40, 1e-6, 1e39, 10**400, np.int64(5), np.float32(0.5), np.bool_(True), np.nan]),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(-1, 33), max_size=8).map(tuple),
    st.lists(st.one_of(st.integers(0, 31), st.floats(), st.none(), st.booleans()), max_size=4),
    st.lists(st.integers(0, 31), max_size=5).map(np.array),
    st.dictionaries(st.integers(0, 9), st.integers(0, 9), max_size=2),
)
FIELDS = ["id", "prompt", "params", "group", "response", "chunk_tokens", "exact_tokens", "earlier", "kv_rank"]
FIELDS += ["priority", "last_rewards"]
PARAMS = ["temperature", "top_k", "top_p", "min_p", "max_tokens", "stop_token_ids"]


@pytest.fixture(scope="module")
def served():
    """An engine, and what it generates for a good request."""
    made = engine(max_kv_tokens=256)
    made.submit([replace(GOOD, id="reference")])
    return made, tokens(made.run())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=2),
    params=st.dictionaries(st.sampled_from(PARAMS), JUNK, max_size=2),
)
def test_junk_costs_only_its_request(served, fields, params):
    made, reference = served
    junk = replace(GOOD, **({"params": replace(GOOD.params, **params)} | fields))
    try:
        made.submit([junk])
    except ValueError as error:
        assert f"request {junk.id!r:.200}" in str(error)
        named = [*fields, *params, "the prompt is empty", "the response has", "max_tokens", "prompt"]
        assert any(name in str(error) for name in named)
        assert made.run() == []
    else:
        (output,) = made.run()
        assert output.finish_reason in ("stop", "length", "chunk") and all(0 <= token < 32 for token in output.tokens)
    made.submit([replace(GOOD, id="reference")])
    assert tokens(made.run()) == reference
