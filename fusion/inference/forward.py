"""Compute one step: run the scheduled tokens through this rank's layers, then sample.

step ─► batch ─► [hidden of the previous stage] ─► layers, attending to paged KV ─► [next stage] ─► draw ─► tokens
"""

import torch
import torch.distributed as dist

from fusion.inference.attention import PagedAttention
from fusion.inference.batch import Batch, build_batch
from fusion.inference.drawing import Draw
from fusion.inference.kv_cache import KVCache
from fusion.inference.parked import ParkedKV
from fusion.inference.routing import RoutingCache, of_all_layers
from fusion.inference.sampler import Sampled
from fusion.inference.sequence import EngineStep
from fusion.model import Mesh, Routed, RowSplit, Transformer, routing_dtype, routing_of, whole_rows
from fusion.npu import Device


class Forward:
    """Compute steps. Collective over the mesh. ``seed``: seed of the run; ``routing``: records the experts of all
    tokens; None: does not record."""

    def __init__(
        self,
        *,
        model: Transformer,
        mesh: Mesh,
        device: Device,
        cache: KVCache,
        parked: ParkedKV,
        routing: RoutingCache | None,
        seed: int,
        batch_invariant: bool,
        max_rows: int,
    ):
        self.model, self.mesh, self.device, self.cache, self.parked = model, mesh, device, cache, parked
        self.routing, self.batch_invariant = routing, batch_invariant
        self._max_dispatched_rows = model.max_dispatched_rows
        self.draw = Draw(model, mesh, seed, max_rows)

    @torch.inference_mode()
    def __call__(self, step: EngineStep) -> Sampled:
        """Return a token for each of ``step.drawn``, the same on ranks of equal schedule."""
        batch = build_batch(step, self.cache, self.batch_invariant)
        self.parked.restore(step.restored)
        self.cache.copy(step.copied)
        if self.routing and step.copied:
            self.routing.copy(step.copied)
        routed: list[Routed] | None = [] if self.routing else None
        rows = self._plan_rows(len(batch.ids))
        attend, hidden = PagedAttention(self.cache, batch), self._receive_hidden(rows)
        out = self.model(batch.ids, batch.positions, attend, routed, hidden, rows=rows)
        if not self.mesh.last_stage:
            if out.shape[0]:
                dist.send(out, group=self.mesh.pp_group, group_dst=self.mesh.pp_rank + 1)
            out = None
        if routed is not None and step:
            self._keep_routing(batch, routed, rows)
        return self.draw(out, batch, step) if step.sampled or step.verified else Sampled([], [])

    def _keep_routing(self, batch: Batch, routed: list[Routed], rows: RowSplit) -> None:
        shape = self.model.config
        if routed:
            routing_of_stage = routing_of(routed, rows, self.mesh, num_experts=shape.num_experts)
        else:  # a stage without sparse layers
            dtype = routing_dtype(shape.num_experts)
            routing_of_stage = torch.empty(len(batch.ids), 0, shape.top_k, dtype=dtype)
        routing = of_all_layers(routing_of_stage, self.mesh, shape)
        if self.routing and routing is not None:
            self.routing.write(batch, routing)

    def _plan_rows(self, count: int) -> RowSplit:
        """Plan how the step's rows lie on the ranks. Collective over the stage, on the host, where EP spans attention
        ranks."""
        mesh, parallel = self.mesh, self.mesh.parallel
        if not self.model.can_hold_whole_rows:
            return RowSplit(count)
        counts = torch.full((parallel.stage_world,), count)
        if parallel.ep > parallel.tp:
            dist.all_gather_into_tensor(counts, torch.tensor([count]), group=mesh.stage_group)
        return whole_rows(parallel, mesh.rank, counts[:: parallel.tp].tolist(), self._max_dispatched_rows)

    def _receive_hidden(self, rows: RowSplit) -> torch.Tensor | None:
        """Receive the hidden states [n, D] of the rows that this TP rank holds; None on the first stage."""
        mesh, model = self.mesh, self.model
        if mesh.first_stage:
            return None
        shape = (rows.count if rows.whole else model.hidden_rows(rows.count), model.config.hidden_size)
        hidden = torch.empty(shape, dtype=model.weights.dtype, device=self.device.torch_device)
        if shape[0]:
            dist.recv(hidden, group=mesh.pp_group, group_src=mesh.pp_rank - 1)
        return hidden
