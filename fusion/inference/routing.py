"""Record the experts that the tokens in the KV cache were routed to, block by block on the host.

    a step's pass ─ routing of its tokens ─► the cells of their KV ─► a request that ends, or whose KV is freed, reads
                                                                      the cells of its rows

Routing is stored with the KV it belongs to: a request that uses a block of the prefix cache also uses its routing. A
row whose next token was sampled keeps the routing of the pass that sampled it (`Sequence.routing`): KV that is
recomputed later, after a preemption or under new weights, changes the cells but no longer that row, so each
log-probability stays with the experts that it was computed with."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from fusion.inference.batch import Places
from fusion.model import Mesh, ModelConfig, routing_dtype


class RoutingCache:
    """Hold cells [blocks, block_size, layers, k] of `routing_dtype` in host memory; pages are only used once they are
    written."""

    def __init__(self, config: ModelConfig, block_size: int):
        self.dtype = routing_dtype(config.num_experts)
        self.cell = block_size, config.num_sparse_layers, config.top_k
        self.allocate(0)

    def allocate(self, blocks: int) -> None:
        """Replace the cells by as many blocks as the KV cache has (0: releases the memory)."""
        self._cells = torch.empty(blocks, *self.cell, dtype=self.dtype).numpy()

    def write(self, places: Places, routing_NLk: torch.Tensor) -> None:
        """Write the routing of all tokens of a step, before any request of the step ends."""
        routing = routing_NLk.numpy()
        repeats = len(places.rows) > len(routing)
        self._cells[places.blocks, places.offsets] = routing[places.rows] if repeats else routing

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks: (from, to)."""
        if pairs and len(self._cells):
            source, target = np.array(pairs).T
            self._cells[target] = self._cells[source]

    def read(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Return the routing [end - start, layers, k] of the tokens ``start:end`` of the sequence in these blocks."""
        size = self.cell[0]
        first = start // size
        cells = self._cells[np.array(blocks[first : -(-end // size)], np.int64)]
        return torch.from_numpy(cells.reshape(-1, *self.cell[1:])[start - first * size : end - first * size])

    def join(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """Return results of `read` one behind the other."""
        return torch.cat(pieces) if pieces else torch.empty(0, *self.cell[1:], dtype=self.dtype)

    def fill(self, blocks: Sequence[int], first: int, routing_TLk: torch.Tensor) -> None:
        """Write a result of `read` back into these blocks, from the sequence's block ``first`` on."""
        size = self.cell[0]
        block, offset = np.divmod(np.arange(first * size, len(routing_TLk)), size)
        self._cells[np.array(blocks, np.int64)[block], offset] = routing_TLk[first * size :].numpy()


def of_all_layers(routing_NLk: torch.Tensor, mesh: Mesh, config: ModelConfig) -> torch.Tensor | None:
    """Gather the sparse layers of all stages in order, on the first stage's first TP rank; return None elsewhere. On
    the CPU; collective over the stages."""
    if mesh.pp_group is None or mesh.tp_rank > 0:
        return routing_NLk if mesh.tp_rank == 0 else None
    if not mesh.first_stage:
        if routing_NLk.numel():
            dist.send(routing_NLk.contiguous().view(torch.uint8), group=mesh.pp_group, group_dst=0)
        return None
    stages = [routing_NLk]
    for stage in range(1, mesh.parallel.pp):
        layers = len(config.sparse(mesh.parallel.layers(config.num_layers, stage)))
        received = routing_NLk.new_empty(len(routing_NLk), layers, config.top_k)
        if received.numel():
            dist.recv(received.view(torch.uint8), group=mesh.pp_group, group_src=stage)
        stages.append(received)
    return torch.cat(stages, dim=1)
