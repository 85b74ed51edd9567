"""Define a request in the engine, and the work of one step. Pure: no tensor, no clock, no process."""

from array import array
from dataclasses import dataclass, field
from typing import Any, Protocol

from fusion.inference.blocks import BlockName
from fusion.inference.noise import request_key
from fusion.inference.request import FinishReason, Output, Request, SamplingParams
from fusion.inference.stop_strings import StopStrings
from fusion.inference.verification import Verification

Blocks = array  # of int
"""A sequence's blocks as int64, so that a step joins those of all sequences as bytes"""


class RecordedRouting(Protocol):
    """The routing of the tokens in the cache, and pieces of it."""

    def read(self, blocks: Blocks, start: int, end: int) -> Any: ...

    def join(self, pieces: list[Any]) -> Any: ...


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in the engine: its tokens so far and which of them are in the cache.

    ``computed``: number of leading tokens whose KV is in ``blocks``. ``names``: names of the full blocks computed so
    far; ``named``: number of leading blocks that were found by name or have been named. ``since``: policy version of
    its oldest KV, and of its names. ``parked``: number of leading tokens whose KV is on the host. ``known``: number of
    leading tokens that were computed before; computing them again counts as recomputation."""

    request: Request
    params: SamplingParams
    stop_token_ids: frozenset[int]
    tokens: list[int]
    limit: int
    """Length at which this submission ends."""
    noise_key: int
    computed: int = 0
    blocks: Blocks = field(default_factory=lambda: array("q"))
    names: list[BlockName] = field(default_factory=list)
    named: int = 0
    since: int = 0
    parked: int = 0
    known: int = 0
    noise: list[float] = field(default_factory=list)
    """Noise of the next positions, in reverse order."""
    routed: int = 0
    """Number of leading tokens whose routing is in ``routing``, or was returned by an earlier submission."""
    routing: list[Any] = field(default_factory=list)
    """Pieces of the routing since, in order: of tokens whose next token this submission sampled."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_counts: list[int] = field(default_factory=list)
    kept_ids: bytearray = field(default_factory=bytearray)
    """As in `Output`"""
    turn_start: int = 0
    """Index in ``tokens`` of the first token of the current turn."""

    @classmethod
    def of(cls, request: Request, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> "Sequence":
        """Create the sequence of a request. ``params``: equal to the request's, may be shared between requests."""
        stops = eos_token_ids if params.stop_token_ids is None else params.stop_token_ids
        tokens = [*request.prompt, *request.response]
        start = len(request.prompt) + request.turn_start
        limit = len(request.prompt) + params.max_tokens
        if request.exact_tokens:
            limit = min(limit, start + request.exact_tokens)
        stops = () if request.exact_tokens else stops
        if request.chunk_tokens:
            limit = min(limit, len(tokens) + request.chunk_tokens)
        # The last sampled one was never an input, nor was what an environment has answered since.
        known = len(tokens) - 1 - request.observation if request.response else 0
        key = request_key(request.id)
        return cls(request, params, frozenset(stops), tokens, limit, key, known=known, routed=known, turn_start=start)

    @property
    def first_token(self) -> int:
        """Index of the response's first token in ``tokens``."""
        return len(self.request.prompt)

    def append(
        self, token: int, logprob: float, version: int, *, kept: bytes = b"", stop_strings: StopStrings | None = None
    ) -> FinishReason | None:
        """Append a token that was sampled; return why the sequence ends with it, or None. ``kept``: as in `Sampled`."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.params.truncates:
            self.kept_counts.append(len(kept) // 4)
            self.kept_ids += kept
        if token in self.stop_token_ids:
            return self._stopped
        if stop_strings and not self.request.exact_tokens and stop_strings.completes(self.tokens, self.turn_start):
            return self._stopped
        return self._reason_at_limit if len(self.tokens) >= self.limit else None

    def keep_routing(self, recorded: RecordedRouting | None) -> None:
        """Keep the routing of the tokens computed since, before their blocks are released. Tokens computed once more
        keep theirs: their next tokens were sampled from the earlier pass."""
        if recorded is not None and self.computed > self.routed:
            self.routing.append(recorded.read(self.blocks, self.routed, self.computed))
            self.routed = self.computed

    @property
    def _stopped(self) -> FinishReason:
        return "turn" if self.request.turns else "stop"

    @property
    def _reason_at_limit(self) -> FinishReason:
        if len(self.tokens) - len(self.request.prompt) >= self.params.max_tokens:
            return "length"
        return self._stopped if len(self.tokens) - self.turn_start == self.request.exact_tokens else "chunk"

    def output(self, reason: FinishReason, recorded: RecordedRouting | None = None) -> Output:
        """Return what the sequence has generated, with its routing, before its blocks are released."""
        request = self.request
        self.keep_routing(recorded)
        new = self.tokens[len(request.prompt) + len(request.response) :]
        return Output(
            request_id=request.id,
            group=request.group,
            prompt=request.prompt,
            tokens=new,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=reason,
            before=request.response,
            earlier=request.earlier,
            routing=None if recorded is None else recorded.join(self.routing),
            kept_counts=self.kept_counts,
            kept_ids=self.kept_ids,
            observation=request.observation,
            sampled=[True] * len(new) if request.turns else [],
        )


@dataclass(frozen=True)
class EngineStep:
    """The work of one step.

    ``decodes`` compute one token each; ``chunks`` are (sequence, count) pieces of prefill; ``shared_prefill`` are
    (sequence, one of these): its tokens are those of a chunk that reaches its end, whose rows also fill the sequence's
    last block. ``sampled`` are the sequences for which a token is sampled: all decodes, then the chunks that reach
    their sequence's end, then those of ``shared_prefill``, in this order.
    ``restored`` are (sequence, first block, end): the blocks whose KV is copied from the host first. ``verified`` are
    sequences with a draft, of which a token is sampled behind every row; ``copied`` are (from, to): blocks that are
    copied first, for the paths of the drafts."""

    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]]
    sampled: list[Sequence]
    restored: list[tuple[Sequence, int, int]] = field(default_factory=list)
    verified: list[Verification] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    shared_prefill: list[tuple[Sequence, Sequence]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sampled or self.chunks or self.verified)

    @property
    def drawn(self) -> list[Sequence]:
        """The sequence of each token that is sampled: ``sampled``, then the rows of ``verified``."""
        return self.sampled + [draft.seq for draft in self.verified for _ in range(len(draft))]

    @property
    def kind(self) -> str:
        """`prefill` (with or without decodes), `decode` (only decodes), or "" (computes nothing)."""
        return "prefill" if self.chunks else "decode" if self else ""
