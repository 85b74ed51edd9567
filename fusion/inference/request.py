"""What goes into an engine and what comes out: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "chunk", "turn", "abort"]

CONTINUED: frozenset[FinishReason] = frozenset({"chunk", "turn"})
"""Why a submission ends whose request goes on later, with its KV where that is kept"""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Filters apply in this order to softmax(logits / temperature): top-k, top-p, min-p; of what they keep, the
    `MAX_KEPT_IDS` most likely ids are sampled from. ``temperature``: 0 (greedy) or `validation.MIN_TEMPERATURE` to
    `MAX_TEMPERATURE`. ``max_tokens`` bounds the whole response over all its chunks. ``stop_token_ids`` None means the
    model's end tokens; () never stops early."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] | None = None

    @property
    def truncates(self) -> bool:
        """Whether filters apply. If so, the ids that they keep are recorded with every token."""
        return self.temperature != 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


LastRewards = tuple[str, tuple[float | None, ...]]
"""`Request.last_rewards`"""

NO_REWARDS: LastRewards = ("", ())
"""`Request.last_rewards` where none are known; one object, which all of these requests share"""


@dataclass
class Request:
    """One response to generate, from its beginning or behind tokens that it has. Not changed after it was created (a
    frozen dataclass would take twice as long to create, and there is one for every sample).
    ``id``: unique among unfinished requests; with the run seed and a token's position it determines what is sampled, so
        a request that is resumed after a chunk or an abort keeps its id.
    ``prompt``: token ids, at least one.
    ``group``: the same for requests with one prompt.
    ``response``: tokens generated before; generation continues behind them.
    ``chunk_tokens``: number of new tokens after which it ends with reason "chunk"; 0: no chunks.
    ``exact_tokens``: length of the whole response, with ``turns`` of the current turn, over all its chunks: no stop
        token ends it before, and it ends there with reason "stop" or "turn" (at max_tokens with "length"); 0: the model
        ends it.
    ``earlier``: the caller's name for what belongs to ``response``; returned with the output.
    ``kv_rank``: the attention rank of the engine that has its KV (`Output.kv_rank`); None: there is none. A preference:
        if that rank has its share of requests, or the KV was freed, it is recomputed.
    ``kv_tokens``: number of tokens whose KV is in the machine's pool (`Output.kv_tokens`), for any engine; 0: none. If
        it is not found there, or is not of this engine's weights, it is recomputed.
    ``kv_engine``: the engine that has parked it, if that is another one, numbered as in the run: where KV travels
        between machines, its machines are asked, too; None: they are not.
    ``priority``: of the requests that wait in an engine those of the lowest are admitted first, of equal ones in order
        of arrival; at least 0.
    ``last_rewards``: the group that answered the prompt before this one, and the reward of each of its responses, in
        the order of their numbers; None: it has none. For drafts from them (`TextDrafter`); () is not known.
    ``turns``: a conversation: what would end it with reason "stop" ends its turn with reason "turn", and it goes on
        behind what an environment answers.
    ``observation``: number of the last tokens of ``response`` that an environment has answered since the last token
        that was sampled. No engine has had them as input, nor that token.
    ``turn_start``: number of the first tokens of ``response`` that are before the current turn, in which alone stop
        strings are looked for; with an observation all of them are."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    group: str = ""
    response: tuple[int, ...] = ()
    chunk_tokens: int = 0
    exact_tokens: int = 0
    earlier: str = ""
    kv_rank: int | None = None
    priority: int = 0
    kv_tokens: int = 0
    last_rewards: LastRewards = NO_REWARDS
    kv_engine: int | None = None
    turns: bool = False
    observation: int = 0
    turn_start: int = 0


@dataclass
class Output:
    """What a request generated since it was submitted.

    ``tokens``: the *new* tokens, the stop token included. ``logprobs``: of each, under the distribution that it was
    sampled from: softmax(logits / temperature) over the ids that the filters kept, without filters over the whole
    vocabulary (temperature 1 where it is 0), computed in float32. ``versions``: the policy version that sampled each.
    ``kept_counts``: where filters apply, number of ids that they kept for each token; 0: the whole vocabulary.
    ``kept_ids``: these ids, token by token, int32 as bytes.
    ``finish_reason``: "stop" (a stop token or string, or exact_tokens; with `Request.turns` "turn"), "length"
    (max_tokens), "chunk" (chunk_tokens), "abort". ``before``, ``earlier``, ``observation``: the request's `response`,
    `earlier` and `observation`. ``sampled``: of a request with turns, whether each token was sampled; an engine returns
    only such tokens, what was said before them is put in front of them later.
    ``routing``: where the engine keeps it, `routing_dtype` [T, layers, k]: the experts of each token that was an input
    and has none yet, in the pass from which the token behind it was sampled (of a prompt's tokens, the first pass).
    They are all tokens of prompt and response but the last; where the request came with a response, those from its last
    sampled token on. So the rows of all submissions, one behind the other, are paired with the response's
    log-probabilities. A request that is aborted before its first token has those that were computed.
    ``kv_rank``: of an aborted or `CONTINUED` request, the attention rank at which its KV is parked or, until the memory
    is needed, cached; None: its KV was freed.
    ``kv_tokens``: number of its tokens whose KV is in the machine's pool; 0: none."""

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
    kv_tokens: int = 0
    kept_counts: list[int] = field(default_factory=list)
    kept_ids: bytes | bytearray = b""
    observation: int = 0
    sampled: list[bool] = field(default_factory=list)
