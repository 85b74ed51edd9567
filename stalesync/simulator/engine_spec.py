"""Define what simulated engines have in common, and whom they report to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fusion.costmodel.pace import EngineCost
from fusion.inference.config import EngineConfig
from fusion.rollout import SuspendedSample
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
    """What engines have in common. ``chunk_tokens``: None: no chunks; ``keeps_kv``: the KV of suspended requests is
    parked; ``pools_kv``: where every engine finds it, within one version; ``pools_suspended``: also that of engines
    that stop; ``adopt_s``: pause for new weights; ``drafts``: None: there are none."""

    cost: EngineCost
    num_ranks: int
    limits: EngineConfig
    chunk_tokens: int | None = None
    keeps_kv: bool = False
    pools_kv: bool = False
    pools_suspended: bool = False
    adopt_s: float = 0.0
    drafts: DraftSpec | None = None


@dataclass
class EngineListener:
    """Whom an engine reports to. ``samples``: response tokens by id; ``chunks``: requests at the end of a chunk or
    turn; ``stopped``: unfinished requests."""

    samples: Callable[[int, Mapping[str, int]], None]
    chunks: Callable[[int, Sequence[SuspendedSample]], None]
    stopped: Callable[[int, Sequence[SuspendedSample]], None]
