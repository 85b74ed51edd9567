"""Replay steps that only decode as graphs of the card: one launch from the host instead of one for every operator.

    step ─► rows and blocks, padded ─► first seen: computed ─► again: captured ─► later: ids, positions, slots, block
                                                                                 table copied ─► lengths ─► replayed

A graph reads and writes the memory that it was captured with: weights, KV pools, its own inputs and outputs. So there
is one for every padded size, and all are dropped where weights or pools may have moved; they are captured again as
sizes recur. Sampling is behind the graph, as its kinds differ from step to step.

Invariants: a graph computes what the operators compute that it was captured from, on the step's own inputs; all ranks
of an engine capture, replay and drop the same sizes in the same step; padding writes what its sequence writes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fusion.inference.batch import Batch, BatchPlan, BatchSize
from fusion.inference.config import RolloutConfig, check_graphs
from fusion.inference.counters import Counters
from fusion.inference.sequence import EngineStep
from fusion.model import Routed
from fusion.npu import Device
from fusion.npu.failures import FailureKind, kind_of
from fusion.npu.operators import PagedRows

CAPTURED_AT = 3
"""Number of times that a size is seen until it is captured: a capture takes as long as some steps"""

MAX_GRAPHS = 48
"""Maximum number of sizes; steps of others are computed"""

Computed = tuple[torch.Tensor, list[Routed] | None]
"""What the layers return, and the routing of their tokens, if it is recorded"""


class DecodeGraph(NamedTuple):
    """``inputs``: int64, as `BatchPlan.on_host` joins them; ``outputs``: written by each replay."""

    graph: Any
    inputs: torch.Tensor
    outputs: Computed


class DecodeGraphs:
    """Graphs of one rank. ``block_size``: tokens of a KV block; ``addresses``: returns where the weights are."""

    def __init__(self, device: Device, block_size: int, addresses: Callable[[], list[int]], counters: Counters):
        self._device, self._block_size, self._addresses, self._counters = device, block_size, addresses, counters
        self._graphs: dict[BatchSize, DecodeGraph] = {}
        self._seen: Counter[BatchSize] = Counter()
        self._weights: list[int] = []
        self.may_have_moved = False
        """Whether weights may be elsewhere than when the first graph was captured; set on all ranks alike"""

    @classmethod
    def of(
        cls, config: RolloutConfig, device: Device, addresses: Callable[[], list[int]], counters: Counters
    ) -> "DecodeGraphs | None":
        """Return those of an engine; None: it has none.
        Raise ValueError: it is to have some, and cannot (`check_graphs`)."""
        if not config.engine.graphs:
            return None
        check_graphs(config, device.kind, device.operators.name)
        return cls(device, config.engine.block_size, addresses, counters)

    def __call__(self, size: BatchSize, plan: BatchPlan, compute: Callable[[Batch], Computed]) -> Computed:
        """Return what ``compute`` returns for the plan's batch of ``size``, valid until the next call."""
        kept = self._graphs.get(size)
        if kept is None:
            self._seen[size] += 1
            if self._seen[size] < CAPTURED_AT or len(self._graphs) == MAX_GRAPHS:
                return compute(plan.send(self._device))
            kept = self._graphs[size] = self._capture(size, plan, compute)
        else:
            kept.inputs.copy_(plan.on_host(self._device), non_blocking=True)
        if name := self._device.operators.lengths_argument:
            kept.graph.update(cpu_update_input=[{name: plan.lengths.tolist()}])
        kept.graph.replay()
        self._counters.graph_steps += 1
        return kept.outputs

    def follow_weights(self, agree: Callable[[list[int]], list[int]]) -> None:
        """Drop all graphs if the weights of a rank have moved. Collective where they may have."""
        if self.may_have_moved:
            self.may_have_moved = False
            (unmoved,) = agree([int(not self._graphs or self._addresses() == self._weights)])
            if not unmoved:
                self.clear()

    def clear(self) -> None:
        """Drop all graphs, and the memory of what they computed."""
        self._counters.graphs_dropped += len(self._graphs)
        for kept in self._graphs.values():
            kept.graph.reset()
        self._graphs.clear()
        self._seen.clear()

    def _capture(self, size: BatchSize, plan: BatchPlan, compute: Callable[[Batch], Computed]) -> DecodeGraph:
        device, others = self._device, [*self._graphs.values()]
        if not others:
            self._weights = self._addresses()
        inputs = plan.on_host(device).to(device.torch_device)

        def compute_longest() -> Computed:
            """Compute with grids and workspaces that suffice for all lengths of this size."""
            batch = plan.of(inputs)
            assert isinstance(batch.rows, PagedRows)
            longest = batch.rows._replace(host_lengths=(size.blocks * self._block_size,) * size.rows)
            return compute(replace(batch, rows=longest))

        try:
            graph, outputs = device.capture(compute_longest, others[0].graph if others else None)
        except RuntimeError as error:
            if kind_of(error) is not FailureKind.FAILED:
                raise
            begun = error.__context__  # where a capture has failed, its end may fail, too
            if begun is not None and kind_of(begun) is not FailureKind.FAILED:
                raise begun from None
            raise RuntimeError(
                f"rollout.engine.graphs=true: a decode step of this model cannot be captured ({error}); expected false"
            ) from error
        self._counters.graphs_captured += 1
        return DecodeGraph(graph, inputs, outputs)


def size_of(step: EngineStep, block_size: int) -> BatchSize:
    """Return the rows of a step that only decodes, and the blocks of its longest one; else (0, 0)."""
    if not step.decodes or step.chunks or step.verified or step.shared_prefill:
        return BatchSize(0, 0)
    longest = max(seq.computed for seq in step.decodes)
    return BatchSize(len(step.decodes), longest // block_size + 1)


def padded(size: BatchSize) -> BatchSize:
    """Return the size of the graph: rows to a power of two, above 16 to a multiple of 16; blocks to a power of two."""
    rows = -(-size.rows // 16) * 16 if size.rows > 16 else 1 << (size.rows - 1).bit_length()
    return BatchSize(rows, 1 << (size.blocks - 1).bit_length())
