"""Define the settings that the decisions of a run depend on. `stalesync/job/decision_settings.py` resolves them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion.rollout import HistoPipeSpec, PoolRouting

AHEAD = 1.25, 1.5
"""Bounds of an engine's requests, relative to the number that it decodes at a time: at or below the first it receives
more, up to the second."""


@dataclass(frozen=True)
class AdmissionSpec:
    """The settings of a run that its decisions depend on, in addition to the ledger's. ``shared_engines``: engines on
    cards that train; ``engine_slots``: requests an engine decodes at a time; ``ahead``: whether generation runs ahead
    of training (staleness above 0); ``scores_overlapped``: whether samples are scored while others are generated;
    ``keeps_kv``: whether engines park the KV of suspended requests; ``kv_pool``: how they share it, None: they do not;
    ``chunk_tokens``: after which a request is suspended, 0: never; ``lends``: whether cards that train may leave
    generation before a step has its groups (`lending.py`), of which the first of ``minibatches`` is then accumulated;
    ``filters``: whether the algorithm may filter groups; ``max_filtered_groups``: number of filtered groups that a step
    replaces; ``num_probes``: requests of a group that run ahead of the others; ``order``: of dispatch,
    ``exact_lengths`` and ``histopipe`` for it, as of `RequestBuffer`, and ``num_rows`` of the data, 0: none comes a
    second time; ``turns``: whether requests are conversations, which are away between their turns."""

    group_size: int
    num_engines: int
    shared_engines: frozenset[int]
    engine_slots: int
    max_response_tokens: int
    max_filtered_groups: int
    ahead: bool = False
    scores_overlapped: bool = True
    keeps_kv: bool = False
    kv_pool: PoolRouting | None = None
    num_probes: int = 0
    chunk_tokens: int = 0
    lends: bool = False
    minibatches: int = 1
    filters: bool = True
    order: str = "fifo"
    num_rows: int = 0
    exact_lengths: Callable[[str], Sequence[int]] = lambda group: ()
    histopipe: HistoPipeSpec | None = None
    turns: bool = False

    @property
    def binds_late(self) -> bool:
        """Whether requests wait here until an engine has capacity."""
        return self.ahead or self.chunk_tokens > 0 or self.turns

    @property
    def max_requests(self) -> int:
        """Maximum number of requests of an engine, where they are bound late."""
        return round(AHEAD[1] * self.engine_slots)

    @property
    def low_requests(self) -> int:
        """Number of requests at or below which an engine receives more; -1: it receives all at the start."""
        return round(AHEAD[0] * self.engine_slots) if self.binds_late else -1
