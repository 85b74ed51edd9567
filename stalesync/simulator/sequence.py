"""Define what simulated engines have in common, the requests in them, and what a step of an attention rank prefills.
Plain data."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from fusion.costmodel.pace import EngineCost
from fusion.inference.config import EngineConfig
from stalesync.simulator.drafts import DraftSpec


@dataclass(frozen=True)
class RequestSize:
    """Tokens of a request: of its prompt, of its response so far, and at its end. ``turn_end``: of the response when
    its turn ends, None: it is no conversation."""

    prompt_tokens: int
    generated: int
    response_tokens: int
    turn_end: int | None = None


@dataclass(frozen=True)
class EngineSpec:
    """What engines have in common. ``max_tokens``: maximum of a response; ``chunk_tokens``: None: no chunks;
    ``keeps_kv``: the KV of suspended requests is parked; ``pools_kv``: where every engine finds it, within one version;
    ``pools_suspended``: also that of engines that stop; ``adopt_s``: pause for new weights; ``drafts``: None: there are
    none."""

    cost: EngineCost
    num_ranks: int
    limits: EngineConfig
    max_tokens: int
    chunk_tokens: int | None = None
    keeps_kv: bool = False
    pools_kv: bool = False
    pools_suspended: bool = False
    adopt_s: float = 0.0
    drafts: DraftSpec | None = None


class SimulatedRequest(NamedTuple):
    """A request for an engine, as a row of `DispatchedRequests`."""

    id: str
    group: str
    earlier: str = ""
    kv_rank: int | None = None
    priority: int = 0
    kv_tokens: int = 0


@dataclass(eq=False, slots=True)
class SimulatedSequence:
    """A request in the engine. ``length``: tokens of prompt and response at position ``since`` of its ``track``
    (`Decoding`), while it decodes; before, those it begins with; ``limit``: length at which this submission ends;
    ``complete``: whether the response ends there; ``turn``: whether its turn does; ``computed``: tokens whose KV is in
    the cache, while it does not decode; ``parked``: tokens whose KV is on the host; ``shared``: blocks that count for a
    sibling; ``order``: in which sequences began to decode; ``stamp``: how often it has left a track; ``first_version``:
    of its first new token."""

    request: SimulatedRequest
    rank: int
    prompt_tokens: int
    length: int
    limit: int
    complete: bool
    turn: bool = False
    computed: int = 0
    parked: int = 0
    shared: int = 0
    track: int = 0
    since: float = 0
    order: int = 0
    stamp: int = 0
    decoding: bool = False
    first_version: int | None = None

    @classmethod
    def of(
        cls, request: SimulatedRequest, rank: int, size: RequestSize, chunk_tokens: int | None
    ) -> "SimulatedSequence":
        """Return the sequence of a request that is submitted. ``chunk_tokens``: None: no chunks."""
        length = size.prompt_tokens + size.generated
        left = (size.response_tokens if size.turn_end is None else size.turn_end) - size.generated
        chunk = left if chunk_tokens is None else min(left, chunk_tokens)
        turn = chunk == left and size.turn_end is not None
        complete = chunk == left and not turn
        return cls(request, rank, size.prompt_tokens, length, length + chunk, complete=complete, turn=turn)


@dataclass(slots=True)
class PrefillPlan:
    """A rank's part of a step that prefills. ``last``: sequences whose prefill lacks one token, which decode it;
    ``restored``: blocks whose KV is copied from the host; ``preempted``: whether sequences gave up their blocks: no
    waiting request begins."""

    last: list[SimulatedSequence] = field(default_factory=list)
    chunks: list[tuple[SimulatedSequence, int]] = field(default_factory=list)
    shared_prefill: list[SimulatedSequence] = field(default_factory=list)
    restored: int = 0
    preempted: bool = False

    def __bool__(self) -> bool:
        return bool(self.last or self.chunks or self.shared_prefill)


@dataclass(slots=True)
class Cached:
    """Blocks of a prompt or of a suspended request. ``expires``: tokens computed by the rank until they are evicted.
    ``holders``: running sequences that hold them; one of them counts them, for the others they are `shared`."""

    blocks: int
    holders: dict[SimulatedSequence, None] = field(default_factory=dict)
    expires: float = inf
