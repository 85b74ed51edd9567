"""Count what an engine does: one dataclass from the rank that counts to the metric. Pure.

    scheduler, KV pool, engine ─► Counters of a rank ─ exchanged at every step (`control`) ─► sums over the ranks
        sums ─► `InferEngine.status` ─ increase over a stage ─► metrics `rollout/NAME` (`fusion.rollout.engine_stage`)

A new counter is a field here with its documentation; everything between reads `TOTALS`. The fields `kv_pool_…` are
reported only with rollout.kv_pool.suspended=pool, `graph…` only where this project's engine replays graphs."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np


@dataclass
class Counters:
    """Totals of one rank since construction. A request is counted only by the first TP rank of the attention rank that
    owns it, so that sums over ranks are correct."""

    generated_tokens: int = 0
    """Tokens sampled"""
    dummy_steps: int = 0
    """Steps of idle ranks for the exchange between experts"""
    preemptions: int = 0
    """Running requests whose blocks others needed"""
    prefix_hit_tokens: int = 0
    """Tokens whose KV another request had computed"""
    kv_restored_tokens: int = 0
    """Tokens whose KV was copied back from the host"""
    recomputed_tokens: int = 0
    """Tokens computed again because their KV had been dropped"""
    interrupted: int = 0
    """Running requests with tokens whose KV was dropped because of new weights"""
    drafted_tokens: int = 0
    """Tokens of drafts that were verified"""
    accepted_tokens: int = 0
    """Tokens of drafts that were sampled"""
    decoded_sequences: int = 0
    """Sequences that decoded in a step, with a draft or without, over all steps; the weight of tokens per forward"""
    graph_steps: int = 0
    """Steps replayed as a graph"""
    graphs_captured: int = 0
    """Graphs captured"""
    graphs_dropped: int = 0
    """Graphs dropped because weights or KV were released or have moved, as at a switch"""
    kv_pool_hits: int = 0
    """Requests continued behind KV that this rank wrote itself"""
    kv_pool_pulls: int = 0
    """Requests continued behind KV that another rank or engine wrote"""
    kv_pool_remote: int = 0
    """Those of these requests whose KV was on another machine"""
    kv_pool_prompts: int = 0
    """Prompts whose blocks were copied from files instead of computed; siblings that share them are one"""
    kv_pool_misses: int = 0
    """Requests whose KV was not found"""
    kv_pool_damaged: int = 0
    """Requests whose KV was not what it should be"""
    kv_pool_evictions: int = 0
    """Files removed to make room, or for lack of space"""
    kv_pool_bytes: int = 0
    """Bytes fetched"""
    kv_pool_s: float = 0.0
    """Seconds spent reading, writing, verifying and waiting for files"""


TOTALS = tuple(field.name for field in fields(Counters))


class RankState(NamedTuple):
    """What a rank sends to the others at every step. ``waiting``, ``running``: its requests; ``update_bytes``: of what
    it sends in `ControlChannel.spread`."""

    waiting: int = 0
    running: int = 0
    update_bytes: int = 0
    counters: Counters | None = None
    """None: this rank counts nothing"""

    def row(self) -> list[float]:
        """Return the state as numbers, exact in float64: counts are below 2^53."""
        totals = vars(self.counters).values() if self.counters is not None else [0.0] * len(TOTALS)
        return [self.waiting, self.running, self.update_bytes, *totals]


COLUMNS = len(RankState().row())


class RankStates:
    """The states of all ranks at one step. ``table``: float64 [ranks, `COLUMNS`], a row of `RankState` each."""

    def __init__(self, table: np.ndarray) -> None:
        self._table = table

    @property
    def waiting(self) -> int:
        return int(self._table[:, 0].sum())

    @property
    def running(self) -> int:
        return int(self._table[:, 1].sum())

    @property
    def unfinished(self) -> np.ndarray:
        """Number of requests that wait or run, by rank: int64 [ranks]."""
        return self._table[:, :2].sum(1).astype(np.int64)

    def update_bytes(self, rank: int) -> int:
        return int(self._table[rank, 2])

    def totals(self) -> dict[str, float]:
        """Return the sums of the counters over the ranks."""
        return dict(zip(TOTALS, self._table[:, -len(TOTALS) :].sum(0).tolist(), strict=True))
