"""Check what enters an engine, before any of it is sent to the engine's ranks. Pure.

    Request of a caller ─► checked_requests ─┬─► Request of exact Python types that every rank can compute
                                             └─► ValueError: request, field, value, and what was expected

Invariants (tests/inference/test_validation.py):
1. A request, however malformed, is either returned or refused with a `ValueError` that names its id and the field.
2. A returned request survives the control channel unchanged, and the engine finishes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from fusion.inference.request import NO_REWARDS, Request, SamplingParams
from fusion.telemetry.validation import Checks, is_finite

if TYPE_CHECKING:
    from fusion.inference.config import SamplingConfig

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5
"""Bounds of a temperature other than 0. Logits are divided by it in float32: below, they could exceed its range; above,
their differences vanish in its 24 bits."""
MAX_TOKENS = 10**9
MAX_RANKS = 1 << 16
SHARED = ("prompt", "response", "params", "last_rewards")
"""Fields that several requests share, as one object"""
_NUMBERS = {
    "chunk_tokens": (MAX_TOKENS, False),
    "priority": (MAX_TOKENS, False),
    "kv_tokens": (MAX_TOKENS, False),
    "observation": (MAX_TOKENS, False),
    "turn_start": (MAX_TOKENS, False),
    "kv_rank": (MAX_RANKS - 1, True),
    "kv_engine": (MAX_RANKS - 1, True),
}
"""Whole numbers of a request: the highest one, and whether None is accepted"""


def check_sampling(group: str, sampling: SamplingParams | SamplingConfig) -> None:
    """Check the sampling parameters of a request or of the config.
    Raise ValueError: a parameter out of its range; ``group`` prefixes its key."""
    check, temperature = Checks(group, sampling), sampling.temperature
    in_range = is_finite(temperature) and (temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE)
    check.that(
        "temperature", in_range, f"0 (greedy decoding) or a number in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}]"
    )
    check.integer("top_k", at_least=0)
    check.number("top_p", above=0, at_most=1)
    check.number("min_p", at_least=0, at_most=1)


def checked_requests(requests: Iterable[Request], vocabulary: int) -> list[Request]:
    """Return the requests with exact Python types: tokens and numbers may have been those of numpy or torch, and
    sequences of tokens lists. What several share, such as a group's prompt, is checked once.
    Raise ValueError: names the request, the field, its value and what was expected."""
    shared = _Shared(vocabulary)
    return [_checked(request, shared) for request in requests]


class _Shared:
    """Check the fields that several requests share for one vocabulary, each object once: they cannot change."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._known: dict[str, dict[int, tuple[Any, Any]]] = {name: {} for name in SHARED}
        """Object, so that no other one gets its id, and what it has become, by field and id"""

    def __call__(self, request: Request, name: str) -> Any:
        value = getattr(request, name)
        known = self._known[name].get(id(value))
        if known is not None:
            return known[1]
        check = _params if name == "params" else _last_rewards if name == "last_rewards" else _tokens
        checked = check(f"{_name(request)}: {name}", value, self._vocabulary)
        if isinstance(value, (tuple, SamplingParams)):
            self._known[name][id(value)] = value, checked
        return checked


def _checked(request: Request, shared: _Shared) -> Request:
    # Written for speed: a stage submits all of its requests at once, and each field of each is checked.
    if not isinstance(request, Request):
        raise ValueError(f"request={request!r:.200}: expected a Request")
    for name in ("id", "group", "earlier"):
        text = getattr(request, name)
        if type(text) is not str or not text.isascii():
            _check_text(f"{_name(request)}: {name}", text)
    checked = {name: shared(request, name) for name in SHARED}
    begun, limit = len(checked["response"]), checked["params"].max_tokens
    if not checked["prompt"]:
        raise ValueError(f"{_name(request)}: the prompt is empty; expected at least one token")
    if begun >= limit:
        raise ValueError(
            f"{_name(request)}: the response has {begun} tokens already; expected fewer than max_tokens={limit}"
        )
    for name, (highest, null) in _NUMBERS.items():
        value = getattr(request, name)
        if value is None and null:
            continue
        if type(value) is not int:
            value = _whole(value)
        checked[name] = value
        if type(value) is not int or not 0 <= value <= highest:
            expected = f"a whole number in [0, {highest}]{', or None' if null else ''}"
            raise ValueError(f"{_name(request)}: {name}={value!r:.200}: expected {expected}")
    observation, start = checked["observation"], checked["turn_start"]
    if (observation or start) and not (observation < begun and (start == begun if observation else start <= begun)):
        expected = f"fewer than the {begun} tokens of the response, and all of them, without an observation at most all"
        raise ValueError(f"{_name(request)}: observation={observation}, turn_start={start}: expected {expected}")
    exact = checked["exact_tokens"] = _whole(request.exact_tokens)
    if type(exact) is not int or (exact and not begun - start < exact <= limit):
        expected = f"0, or more than the {begun - start} tokens of the response and at most max_tokens={limit}"
        raise ValueError(f"{_name(request)}: exact_tokens={exact!r:.200}: expected {expected}")
    if type(request.turns) is not bool:
        raise ValueError(f"{_name(request)}: turns={request.turns!r:.200}: expected true or false")
    return _plain(request, **checked)


def _last_rewards(name: str, value: Any, vocabulary: int) -> tuple[str, tuple[float | None, ...]]:
    """Return the value itself if it has exact types already."""
    if value is NO_REWARDS:
        return NO_REWARDS
    if not (type(value) in (tuple, list) and len(value) == 2 and type(value[1]) in (tuple, list)):
        raise ValueError(f"{name}={value!r:.200}: expected (group, rewards)")
    group, rewards = value
    _check_text(f"{name}[0]", group)
    for reward in rewards:
        if reward is not None and not is_finite(reward):
            raise ValueError(f"{name} has {reward!r:.200}: expected a finite number, or None")
    if type(value) is type(rewards) is tuple and all(reward is None or type(reward) is float for reward in rewards):
        return value
    return group, tuple(None if reward is None else float(reward) for reward in rewards)


def _name(request: Request) -> str:
    return f"request {request.id!r:.200}"


def check_fits(request: Request, max_length: int, capacity_tokens: int) -> None:
    """Check that a request can finish. Raise ValueError: it cannot; names the numbers and the keys to change."""
    length = len(request.prompt) + request.params.max_tokens
    sizes = f"request {request.id!r}: prompt {len(request.prompt)} + max_tokens {request.params.max_tokens}"
    if length > max_length:
        raise ValueError(f"{sizes} exceeds {max_length} positions (rollout.max_length and the model's)")
    if length > capacity_tokens:
        raise ValueError(
            f"{sizes} exceeds the KV cache of {capacity_tokens} tokens; raise rollout.engine.kv_fraction or "
            "rollout.engine.max_kv_tokens, or lower rollout.max_response_length"
        )


def check_distinct(requests: Sequence[Request]) -> None:
    """Check that no two requests have the same id. Raise ValueError: names the id."""
    known: set[str] = set()
    for request in requests:
        if request.id in known:
            raise ValueError(f"request {request.id!r}: submitted twice; expected an id for each unfinished request")
        known.add(request.id)


def checked_ids(ids: Iterable[str]) -> list[str]:
    """Return the request ids of a control call. Raise ValueError: not several texts."""
    if isinstance(ids, str):
        raise ValueError(f"ids={ids!r}: expected a list of request ids")
    ids = list(ids)
    for id in ids:
        _check_text("a control call: ids", id)
    return ids


def checked_version(version: int) -> int:
    """Return a policy version. Raise ValueError: not a natural number."""
    plain = _whole(version)
    if type(plain) is not int or plain < 0:
        raise ValueError(f"version={version!r:.200}: expected a whole number of at least 0")
    return plain


def _params(group: str, params: Any, vocabulary: int) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"{group}={params!r:.200}: expected SamplingParams")
    stops = params.stop_token_ids
    plain = _plain(
        params,
        temperature=_number(params.temperature),
        top_k=_whole(params.top_k),
        top_p=_number(params.top_p),
        min_p=_number(params.min_p),
        max_tokens=_whole(params.max_tokens),
        stop_token_ids=None if stops is None else _tokens(f"{group}.stop_token_ids", stops, vocabulary),
    )
    check_sampling(group, plain)
    Checks(group, plain).integer("max_tokens", at_least=1, at_most=MAX_TOKENS)
    # More than all tokens are all tokens.
    return replace(plain, top_k=vocabulary) if plain.top_k > vocabulary else plain


def _tokens(name: str, tokens: Any, vocabulary: int) -> tuple[int, ...]:
    """Return token ids as a tuple of int."""
    if hasattr(tokens, "tolist"):  # an array or a tensor
        tokens = tokens.tolist()
    expected = f"token ids, whole numbers in [0, {vocabulary - 1}]"
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Sequence):
        raise ValueError(f"{name}={tokens!r:.200}: expected a sequence of {expected}")
    if not {*map(type, tokens)} <= {int}:
        tokens = [_whole(token) for token in tokens]
    for index, token in enumerate(tokens) if _any_invalid(tokens, vocabulary) else ():
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ValueError(f"{name}[{index}]={token!r:.200}: expected {expected}")
    return tuple(tokens)


def _any_invalid(tokens: Sequence[Any], vocabulary: int) -> bool:
    return not {*map(type, tokens)} <= {int} or (len(tokens) > 0 and not 0 <= min(tokens) <= max(tokens) < vocabulary)


def _whole(value: Any) -> Any:
    """Return a whole number (numpy's too, no bool) as an int, everything else unchanged."""
    if type(value) is int or value is None:  # most are, and asking for an abstract type takes far longer
        return value
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _number(value: Any) -> Any:
    """Return a number (numpy's too, no bool) as a float, everything else unchanged."""
    if type(value) is float:
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:  # a whole number beyond the range of a float
        return value


def _plain(values: Any, **fields: Any) -> Any:
    """Return the dataclass with ``fields``; itself, where they are what it has."""
    for name, value in fields.items():
        if getattr(values, name) is not value:
            return replace(values, **fields)
    return values


def _check_text(name: str, value: Any) -> None:
    try:
        encodable = isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        encodable = False
    if not encodable:
        raise ValueError(f"{name}={value!r:.200}: expected text that UTF-8 can encode")
