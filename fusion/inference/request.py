"""What goes into an engine and what comes out: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fusion.telemetry.validation import Checks

if TYPE_CHECKING:
    import torch

    from fusion.inference.config import RolloutConfig

FinishReason = Literal["stop", "length", "chunk", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Filters apply in this order to softmax(logits / temperature): top-k, top-p, min-p. ``max_tokens`` bounds the whole
    response over all its chunks. ``stop_token_ids`` None means the model's end tokens; () never stops early.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Request:
    """One response to generate, from its beginning or behind tokens that it has.

    Args:
        id: unique among unfinished requests; with the run seed and a token's position it determines what is sampled,
            so a request that is resumed after a chunk or an abort keeps its id.
        prompt: token ids, at least one.
        group: the same for requests with one prompt, which are placed where they share the prompt's KV.
        response: tokens generated before; generation continues behind them.
        chunk_tokens: number of new tokens after which it ends with reason "chunk"; 0: no chunks.
        exact_tokens: length of the whole response over all its chunks: no stop token ends it before, and it ends there
            with reason "stop" (at max_tokens with "length"); 0: the model ends it.
        earlier: the caller's name for what belongs to ``response``; returned with the output.
        kv_rank: the attention rank of the engine that has its KV (`Output.kv_rank`); None: there is none. A preference:
            if that rank has its share of requests, or the KV is gone, it is recomputed.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    group: str = ""
    response: tuple[int, ...] = ()
    chunk_tokens: int = 0
    exact_tokens: int = 0
    earlier: str = ""
    kv_rank: int | None = None


@dataclass
class Output:
    """What a request generated since it was submitted.

    ``tokens``: the *new* tokens, the stop token included. ``logprobs``: of each, under softmax(logits / temperature)
    over the whole vocabulary (temperature 1 where it is 0), computed in float32. ``versions``: the policy version that
    sampled each. ``finish_reason``: "stop" (a stop token, or exact_tokens), "length" (max_tokens), "chunk"
    (chunk_tokens), "abort". ``before``, ``earlier``: the request's `response` and `earlier`.
    ``routing``: where the engine keeps it, `routing_dtype` [T, layers, k]: row t is where token t of the prompt and the
    *whole* response went when it was an input, in the pass that made the KV that the request was last generated from.
    The last token never was one, so T is all tokens but one; an aborted request has fewer, as many as were cached.
    ``kv_rank``: of an aborted or chunked request, the attention rank at which its KV is parked or, until the memory is
    needed, cached; None: its KV is gone.
    """

    request_id: str
    group: str
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    before: tuple[int, ...] = ()
    earlier: str = ""
    routing: torch.Tensor | None = None
    kv_rank: int | None = None


def check_sampling(group: str, sampling: SamplingParams | RolloutConfig) -> None:
    """Checks the sampling parameters of a request or of the config.

    Raises:
        ValueError: a parameter out of its range; ``group`` prefixes its key.
    """
    check = Checks(group, sampling)
    check.number("temperature", at_least=0)
    check.integer("top_k", at_least=0)
    check.number("top_p", above=0, at_most=1)
    check.number("min_p", at_least=0, at_most=1)


def check_request(request: Request, vocabulary: int) -> None:
    """Raises:
    ValueError: what is wrong with it by itself, naming the request.
    """
    where = f"request {request.id!r}"
    check_sampling(f"{where}: params", request.params)
    Checks(f"{where}: params", request.params).integer("max_tokens", at_least=1)
    if not request.prompt:
        raise ValueError(f"{where}: the prompt is empty; expected at least one token")
    if min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
        raise ValueError(f"{where}: the prompt has a token outside 0 … {vocabulary - 1}")
    if len(request.response) >= request.params.max_tokens:
        raise ValueError(f"{where}: has {len(request.response)} tokens already, max_tokens={request.params.max_tokens}")
    exact, begun = request.exact_tokens, len(request.response)
    if exact and not begun < exact <= request.params.max_tokens:
        expected = f"0, or more than the {begun} it has and at most max_tokens={request.params.max_tokens}"
        raise ValueError(f"{where}: exact_tokens={exact}: expected {expected}")


def check_fits(request: Request, max_length: int, capacity_tokens: int) -> None:
    """Raises:
    ValueError: it could never finish, with the numbers and the keys to change.
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
