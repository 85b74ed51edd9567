"""A response ends with the token that completes a stop string: no earlier, no later, whatever the engine did before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusion.inference import Request, SamplingParams
from fusion.inference.stop_strings import StopStrings
from tests.inference.engines import engine, generate, generate_brokenly, requests
from tests.inference.test_verification import Guesses
from tests.rollouts import rollout_config

PIECES = [bytes([byte]) for byte in range(256)] + [b"ab", b"ba", b" a", b"</a", b">b", "ü".encode(), b"aaaa", b"<eos>"]
"""The bytes of each token"""


def decode(tokens):
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


SPELLED = st.sampled_from([97, 98, 32, 60, 62, 0xC3, 0xBC, *range(256, len(PIECES))])
STOPS = st.lists(st.sampled_from(["a", "ab", "b a", "</a>", "ü", "aü", "a ", "<eos>"]), min_size=1, max_size=3)


@given(st.lists(SPELLED, max_size=60), STOPS, st.lists(SPELLED, max_size=5))
@example(list(b"so <answer>4</answer> and"), ["</answer>"], [])
@example([*"ein Gruß".encode(), 32], ["Gruß"], [71])
def test_a_stop_string_is_found_at_the_token_that_completes_it(response, stops, prompt):
    found = StopStrings(stops, decode)
    tokens = [*prompt]
    for token in response:
        tokens.append(token)
        ends = found.completes(tokens, len(prompt))
        text = decode(tokens[len(prompt) :])
        assert ends == any(one in text for one in stops), text
        if ends:
            break


def test_only_tokens_that_can_end_a_stop_string_have_their_context_decoded():
    decoded = []

    def counting(tokens):
        decoded.append(len(tokens))
        return decode(tokens)

    found, tokens = StopStrings(["</a>"], counting), []
    for token in [97, 98, 32] * 100 + [62]:
        tokens.append(token)
        found.completes(tokens, 0)
    assert decoded == [1, 1, 1, 1, 4 + 8]


def characters(tokens):
    """Token t is the character of code point 64 + t."""
    return "".join(chr(64 + token) for token in tokens)


def cut(tokens, stops):
    ends = [i + 1 for i in range(len(tokens)) if any(one in characters(tokens[: i + 1]) for one in stops)]
    return tokens[: ends[0]] if ends else tokens


def with_stops(stops, **rollout):
    made = engine(**rollout)
    made.scheduler.stop_strings = StopStrings(stops, characters)
    return made


@pytest.mark.parametrize("broken", [None, 0, 1])
def test_outputs_are_those_without_stop_strings_up_to_the_first(broken):
    wanted = requests(12, max_tokens=40)
    whole = {output.request_id: output.tokens for output in generate(engine(), wanted)}
    tokens = sorted(whole.values(), key=len)[-1]
    stops = [characters(tokens[10:12]), characters(tokens[20:21])]
    made = with_stops(stops)
    if broken is None:
        outputs = generate(made, wanted)
        got = {output.request_id: output.tokens for output in outputs}
        assert all(
            output.finish_reason == "stop" for output in outputs if len(output.tokens) < len(whole[output.request_id])
        )
    else:
        got = {name: pair[0] for name, pair in generate_brokenly(made, wanted, broken).items()}
    assert got == {name: cut(tokens, stops) for name, tokens in whole.items()} != whole


@pytest.mark.parametrize("broken", [None, 0, 1])
@pytest.mark.parametrize("right", [0.9, 1.0])
def test_a_stop_string_ends_a_response_inside_its_draft(broken, right):
    wanted = requests(12, max_tokens=40)
    whole = {output.request_id: output.tokens for output in generate(engine(), wanted)}
    tokens = sorted(whole.values(), key=len)[-1]
    stops = [characters(tokens[10:12]), characters(tokens[20:21])]
    made = with_stops(stops, max_kv_tokens=2048)
    made.scheduler.drafter = Guesses(whole, right=right)  # drafts go on behind the stop strings
    if broken is None:
        got = {output.request_id: output.tokens for output in generate(made, wanted)}
    else:
        got = {name: pair[0] for name, pair in generate_brokenly(made, wanted, broken).items()}
    assert got == {name: cut(tokens, stops) for name, tokens in whole.items()} != whole
    assert made.scheduler.counters.accepted_tokens > 0
    assert broken is not None or made.scheduler.counters.generated_tokens == sum(map(len, got.values()))


def test_the_prompt_is_not_searched_and_an_exact_length_is_kept():
    request = Request("r", (5, 6, 7), SamplingParams(max_tokens=8, stop_token_ids=()))
    (whole,) = generate(engine(), [request])
    stops = [characters((7,)), characters((7, whole.tokens[0]))]
    stops = [one for one in stops if one not in characters(whole.tokens)]
    (same,) = generate(with_stops(stops), [request])
    assert same.tokens == whole.tokens
    (exact,) = generate(with_stops([characters(whole.tokens[:1])]), [replace(request, exact_tokens=6)])
    assert len(exact.tokens) == 6


@pytest.mark.parametrize("stop", [[""], [1], ["a", None]])
def test_stop_strings_are_texts(stop):
    with pytest.raises(ValueError, match="rollout.sampling.stop=.*: expected a list of texts"):
        rollout_config(stop=stop).validate()
