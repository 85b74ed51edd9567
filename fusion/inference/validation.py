"""Check what enters an engine, before any of it is sent to the engine's ranks. Pure.

    Request of a caller ─► checked_requests ─┬─► Request of exact Python types that every rank can compute
                                             └─► ValueError: request, field, value, and what was expected

Invariants (tests/inference/test_validation.py):
1. A request, however malformed, is either returned or refused with a `ValueError` that names its id and the field.
2. A returned request survives the control channel unchanged, and the engine finishes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from fusion.inference.request import NO_REWARDS, Request, SamplingParams
from fusion.telemetry.validation import Checks, is_finite

if TYPE_CHECKING:
    from fusion.inference.config import RolloutConfig

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5
"""Bounds of a temperature other than 0. Logits are divided by it in float32: below, they could exceed its range; above,
their differences vanish in its 24 bits."""
MAX_TOKENS = 10**9
MAX_RANKS = 1 << 16


def check_sampling(group: str, sampling: SamplingParams | RolloutConfig) -> None:
    """Check the sampling parameters of a request or of the config.

    Raises:
        ValueError: a parameter out of its range; ``group`` prefixes its key.
    """
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

    Raises:
        ValueError: names the request, the field, its value and what was expected.
    """
    shared = _Shared(vocabulary)
    return [_checked(request, shared) for request in requests]


class _Shared:
    """Check tokens and sampling parameters for one vocabulary, each object once: they cannot change."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._tokens: dict[int, tuple[Any, tuple[int, ...]]] = {}
        """By id: the tuple, so that no other object gets its id, and what it has become"""
        self._params: dict[int, tuple[SamplingParams, SamplingParams]] = {}
        self._rewards: dict[int, tuple[Any, tuple[str, tuple[float | None, ...]]]] = {}

    def tokens(self, request: Request, name: str) -> tuple[int, ...]:
        value = getattr(request, name)
        known = self._tokens.get(id(value))
        if known is not None:
            return known[1]
        checked = _tokens(f"{_name(request)}: {name}", value, self._vocabulary)
        if type(value) is tuple:
            self._tokens[id(value)] = value, checked
        return checked

    def params(self, request: Request) -> SamplingParams:
        value = request.params
        known = self._params.get(id(value))
        if known is None:
            known = self._params[id(value)] = value, _params(_name(request), value, self._vocabulary)
        return known[1]

    def last_rewards(self, request: Request) -> tuple[str, tuple[float | None, ...]]:
        value = request.last_rewards
        known = self._rewards.get(id(value))
        if known is None:
            known = self._rewards[id(value)] = value, _last_rewards(_name(request), value)
        return known[1]


def _checked(request: Request, shared: _Shared) -> Request:
    # Written for speed: a stage submits all of its requests at once, and each field of each is checked.
    if not isinstance(request, Request):
        raise ValueError(f"request={request!r:.200}: expected a Request")
    if not isinstance(request.params, SamplingParams):
        raise ValueError(f"{_name(request)}: params={request.params!r:.200}: expected SamplingParams")
    for name in ("id", "group", "earlier"):
        text = getattr(request, name)
        if type(text) is not str or not text.isascii():
            _check_text(_name(request), name, text)
    prompt, response = shared.tokens(request, "prompt"), shared.tokens(request, "response")
    params, last_rewards = shared.params(request), shared.last_rewards(request)
    chunk, exact, rank = _whole(request.chunk_tokens), _whole(request.exact_tokens), _whole(request.kv_rank)
    priority, kv_tokens, kv_engine = _whole(request.priority), _whole(request.kv_tokens), _whole(request.kv_engine)
    begun, limit = len(response), params.max_tokens
    if not prompt:
        raise ValueError(f"{_name(request)}: the prompt is empty; expected at least one token")
    if begun >= limit:
        raise ValueError(
            f"{_name(request)}: the response has {begun} tokens already; expected fewer than max_tokens={limit}"
        )
    if type(exact) is not int or (exact and not begun < exact <= limit):
        expected = f"0, or more than the {begun} tokens of the response and at most max_tokens={limit}"
        raise ValueError(f"{_name(request)}: exact_tokens={exact!r:.200}: expected {expected}")
    if type(chunk) is not int or not 0 <= chunk <= MAX_TOKENS:
        raise ValueError(f"{_name(request)}: chunk_tokens={chunk!r:.200}: expected a whole number in [0, {MAX_TOKENS}]")
    if rank is not None and (type(rank) is not int or not 0 <= rank < MAX_RANKS):
        raise ValueError(
            f"{_name(request)}: kv_rank={rank!r:.200}: expected a whole number in [0, {MAX_RANKS - 1}], or None"
        )
    if type(priority) is not int or not 0 <= priority <= MAX_TOKENS:
        raise ValueError(f"{_name(request)}: priority={priority!r:.200}: expected a whole number in [0, {MAX_TOKENS}]")
    if type(kv_tokens) is not int or not 0 <= kv_tokens <= MAX_TOKENS:
        raise ValueError(
            f"{_name(request)}: kv_tokens={kv_tokens!r:.200}: expected a whole number in [0, {MAX_TOKENS}]"
        )
    if kv_engine is not None and (type(kv_engine) is not int or not 0 <= kv_engine < MAX_RANKS):
        raise ValueError(
            f"{_name(request)}: kv_engine={kv_engine!r:.200}: expected a whole number in [0, {MAX_RANKS - 1}], or None"
        )
    same = prompt is request.prompt and response is request.response and params is request.params
    same = same and chunk is request.chunk_tokens and exact is request.exact_tokens
    same = (
        same
        and kv_tokens is request.kv_tokens
        and kv_engine is request.kv_engine
        and last_rewards is request.last_rewards
    )
    if same and rank is request.kv_rank and priority is request.priority:
        return request
    return replace(
        request,
        prompt=prompt,
        response=response,
        params=params,
        chunk_tokens=chunk,
        exact_tokens=exact,
        kv_rank=rank,
        priority=priority,
        kv_tokens=kv_tokens,
        kv_engine=kv_engine,
        last_rewards=last_rewards,
    )


def _last_rewards(name: str, value: Any) -> tuple[str, tuple[float | None, ...]]:
    """Return the value itself if it has exact types already."""
    if value is NO_REWARDS:
        return NO_REWARDS
    if not (type(value) in (tuple, list) and len(value) == 2 and type(value[1]) in (tuple, list)):
        raise ValueError(f"{name}: last_rewards={value!r:.200}: expected (group, rewards)")
    group, rewards = value
    _check_text(name, "last_rewards[0]", group)
    for reward in rewards:
        if reward is not None and not is_finite(reward):
            raise ValueError(f"{name}: last_rewards has {reward!r:.200}: expected a finite number, or None")
    if type(value) is type(rewards) is tuple and all(reward is None or type(reward) is float for reward in rewards):
        return value
    return group, tuple(None if reward is None else float(reward) for reward in rewards)


def _name(request: Request) -> str:
    return f"request {request.id!r:.200}"


def check_fits(request: Request, max_length: int, capacity_tokens: int) -> None:
    """Check that a request can finish.

    Raises:
        ValueError: it cannot; names the numbers and the keys to change.
    """
    length = len(request.prompt) + request.params.max_tokens
    sizes = f"request {request.id!r}: prompt {len(request.prompt)} + max_tokens {request.params.max_tokens}"
    if length > max_length:
        raise ValueError(f"{sizes} exceeds {max_length} positions (rollout.max_length and the model's)")
    if length > capacity_tokens:
        raise ValueError(
            f"{sizes} exceeds the KV cache of {capacity_tokens} tokens; raise rollout.kv_fraction or "
            "rollout.max_kv_tokens, or lower rollout.max_response_length"
        )


def check_distinct(requests: Sequence[Request]) -> None:
    """Check that no two requests have the same id.

    Raises:
        ValueError: names the id.
    """
    known: set[str] = set()
    for request in requests:
        if request.id in known:
            raise ValueError(f"request {request.id!r}: submitted twice; expected an id for each unfinished request")
        known.add(request.id)


def checked_ids(ids: Iterable[str]) -> list[str]:
    """Return the request ids of a control call.

    Raises:
        ValueError: not several texts.
    """
    if isinstance(ids, str):
        raise ValueError(f"ids={ids!r}: expected a list of request ids")
    ids = list(ids)
    for id in ids:
        _check_text("a control call", "ids", id)
    return ids


def checked_version(version: int) -> int:
    """Return a policy version.

    Raises:
        ValueError: not a natural number.
    """
    plain = _whole(version)
    if type(plain) is not int or plain < 0:
        raise ValueError(f"version={version!r:.200}: expected a whole number of at least 0")
    return plain


def _params(where: str, params: SamplingParams, vocabulary: int) -> SamplingParams:
    stops = params.stop_token_ids
    group = f"{where}: params"
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
    same = all(getattr(values, name) is value for name, value in fields.items())
    return values if same else replace(values, **fields)


def _check_text(where: str, name: str, value: Any) -> None:
    try:
        encodable = isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        encodable = False
    if not encodable:
        raise ValueError(f"{where}: {name}={value!r:.200}: expected text that UTF-8 can encode")
