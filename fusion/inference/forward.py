"""Compute one step: run the scheduled tokens through this rank's layers, then sample, the same on all ranks.

step ─► batch ─► [hidden of the previous stage] ─► layers, attending to paged KV ─► hidden ─► [next stage]
hidden ─► logits of this TP rank's share of the vocabulary ─► whole rows ─► sampler ─► (last stage broadcasts)
(run seed, request, position) ─► noise ──────────────────────────────────────┘   tokens, logprobs, kept ids
"""

from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from fusion.inference.attention import PagedAttention
from fusion.inference.batch import Batch, BatchSize, Places, plan_batch
from fusion.inference.graphs import Computed, DecodeGraphs, padded, size_of
from fusion.inference.kv_cache import KVCache
from fusion.inference.parked import ParkedKV
from fusion.inference.routing import RoutingCache, of_all_layers
from fusion.inference.sampler import Sampled, noise_of, sample, split_kept
from fusion.inference.sequence import EngineStep, Sequence
from fusion.model import Mesh, Routed, RowSplit, Transformer, routing_dtype, routing_of, whole_rows
from fusion.npu import Device

SMALL_LOGITS = 1 << 20
"""Logits that are in memory at a time, however few rows a step without drafts has."""


class Forward:
    """Compute steps. Collective over the mesh. ``seed``: seed of the run; ``routing``: records the experts of all
    tokens; None: does not record. ``graphs``: replays steps that only decode; None: none are. ``max_rows``: rows whose
    logits are in memory at a time; a step without drafts has no more."""

    def __init__(
        self,
        *,
        model: Transformer,
        mesh: Mesh,
        device: Device,
        cache: KVCache,
        parked: ParkedKV,
        routing: RoutingCache | None,
        graphs: DecodeGraphs | None,
        seed: int,
        batch_invariant: bool,
        max_rows: int,
    ):
        self.model, self.mesh, self.device, self.cache, self.parked = model, mesh, device, cache, parked
        self.routing, self.graphs, self.batch_invariant = routing, graphs, batch_invariant
        self._max_dispatched_rows = model.max_dispatched_rows
        self.seed, self.max_rows = seed, max_rows

    @torch.inference_mode()
    def __call__(self, step: EngineStep) -> Sampled:
        """Return a token for each of ``step.drawn``, the same on ranks of equal schedule."""
        size = None if self.graphs is None else self._agree_on_size(step)
        plan = plan_batch(step, self.cache, self.batch_invariant, size)
        self.parked.restore(step.restored)
        self.cache.copy(step.copied)
        if self.routing and step.copied:
            self.routing.copy(step.copied)
        rows = self._plan_rows(len(plan.arrays[0]), size is not None)
        sampled_rows = None
        # Experts know how many rows other ranks send them: else a layer waits for the host.
        can_capture = rows.whole or self.mesh.ep_group is None and self.mesh.etp_group is None
        if self.graphs is not None and size is not None and can_capture:
            out, routed = self.graphs(size, plan, partial(self._compute, rows=rows))
        else:
            batch = plan.send(self.device)
            (out, routed), sampled_rows = self._compute(batch, rows), batch.sampled
        if size is not None:
            out = out[: len(step.decodes)]
        routing = None if routed is None or not step else self._routing_of_stage(routed, rows)
        sampled = Sampled([], [])
        if step.sampled or step.verified:
            sampled = self._draw(out if self.mesh.last_stage else None, sampled_rows, step)
        if routing is not None:  # of layers that the card has computed by now
            self._keep_routing(plan.places, routing)
        return sampled

    def _compute(self, batch: Batch, rows: RowSplit) -> Computed:
        routed: list[Routed] | None = [] if self.routing else None
        attend, hidden = PagedAttention(self.cache, batch), self._receive_hidden(rows)
        out = self.model(batch.ids, batch.positions, attend, routed, hidden, rows=rows)
        if not self.mesh.last_stage and out.shape[0]:
            dist.send(out, group=self.mesh.pp_group, group_dst=self.mesh.pp_rank + 1)
        return out, routed

    def _routing_of_stage(self, routed: list[Routed], rows: RowSplit) -> torch.Tensor:
        shape = self.model.config
        if routed:
            return routing_of(routed, rows, self.mesh, num_experts=shape.num_experts)
        return torch.empty(rows.count, 0, shape.top_k, dtype=routing_dtype(shape.num_experts))

    def _keep_routing(self, places: Places, routing_of_stage: torch.Tensor) -> None:
        routing = of_all_layers(routing_of_stage.cpu(), self.mesh, self.model.config)
        if self.routing and routing is not None:
            self.routing.write(places, routing)

    def _agree_on_size(self, step: EngineStep) -> BatchSize | None:
        """Return what all ranks of the stage pad a step to that only decodes on each of them, else None. Collective
        over the stage, on the host, where EP spans attention ranks."""
        largest = size_of(step, self.cache.block_size)
        if self._spans_ranks:
            sizes = torch.tensor([largest] * self.mesh.parallel.stage_world)
            dist.all_gather_into_tensor(sizes, torch.tensor([largest]), group=self.mesh.stage_group)
            largest = BatchSize(*sizes.amax(0).tolist()) if sizes.all() else BatchSize(0, 0)
        return padded(largest) if largest.rows else None

    @property
    def _spans_ranks(self) -> bool:
        return self.mesh.parallel.ep > self.mesh.parallel.tp

    def _plan_rows(self, count: int, agreed: bool) -> RowSplit:
        """Plan how the step's rows lie on the ranks. ``agreed``: all have as many. Collective over the stage, on the
        host, where they may differ and EP spans attention ranks."""
        mesh, parallel = self.mesh, self.mesh.parallel
        if not self.model.can_hold_whole_rows:
            return RowSplit(count)
        counts = torch.full((parallel.stage_world,), count)
        if self._spans_ranks and not agreed:
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

    def _draw(self, hidden: torch.Tensor | None, sampled_rows: torch.Tensor | None, step: EngineStep) -> Sampled:
        """Return a token for each of ``step.drawn``, sampled on the last stage from ``hidden`` (None on the others),
        equal on all. ``sampled_rows``: int64 [S], the rows that are sampled; None: all."""
        noise, sequences = noise_of(step.sampled, step.verified, self.seed), step.drawn
        sampled = None
        if hidden is not None:
            if sampled_rows is not None:
                hidden = hidden.index_select(0, sampled_rows)
            sampled = self._sample(hidden, sequences, noise)
            if self.mesh.pp_group is None:
                return sampled
        return self._spread(sampled, sequences)

    def _spread(self, sampled: Sampled | None, sequences: list[Sequence]) -> Sampled:
        """Broadcast what the last stage has sampled; None: on the others."""
        group, source = self.mesh.pp_group, self.mesh.parallel.pp - 1
        drawn = torch.zeros(3, len(sequences), dtype=torch.float64)
        if sampled is not None:
            drawn[0], drawn[1] = torch.tensor(sampled.tokens), torch.tensor(sampled.logprobs, dtype=torch.float64)
            if sampled.kept is not None:
                drawn[2] = torch.tensor([len(ids) // 4 for ids in sampled.kept])
        truncates = any(seq.params.truncates for seq in sequences)  # only then is there a third row to send
        drawn = drawn if truncates else drawn[:2]
        dist.broadcast(drawn, group=group, group_src=source)
        tokens, logprobs = drawn[0].long().tolist(), drawn[1].tolist()
        if not (truncates and drawn[2].any()):
            return Sampled(tokens, logprobs)
        ids, counts = torch.empty(int(drawn[2].sum()), dtype=torch.int32), drawn[2].long().tolist()
        if sampled is not None and sampled.kept is not None:
            ids = torch.frombuffer(bytearray(b"".join(sampled.kept)), dtype=torch.int32)
        dist.broadcast(ids, group=group, group_src=source)
        return Sampled(tokens, logprobs, split_kept(ids.numpy(), counts))

    def _sample(self, hidden: torch.Tensor, sequences: list[Sequence], noise: np.ndarray) -> Sampled:
        tokens: list[int] = []
        logprobs: list[float] = []
        kept: list[bytes] = []
        max_rows = max(self.max_rows, SMALL_LOGITS // self.model.config.vocab_size)
        for start in range(0, len(sequences), max_rows):
            rows = slice(start, start + max_rows)
            logits = self._whole_rows(self.model.head.logits(hidden[rows]))
            some = sample(logits, [seq.params for seq in sequences[rows]], noise[rows])
            tokens += some.tokens
            logprobs += some.logprobs
            kept += [b""] * len(some.tokens) if some.kept is None else some.kept
        return Sampled(tokens, logprobs, kept if any(kept) else None)

    def _whole_rows(self, logits_nVl: torch.Tensor) -> torch.Tensor:
        """Gather the columns of all TP ranks: [n, V]."""
        group = self.mesh.tp_group
        if group is None:
            return logits_nVl
        rows, columns = logits_nVl.shape
        ranks = self.mesh.parallel.tp
        shards = logits_nVl.new_empty(ranks * rows, columns)
        dist.all_gather_into_tensor(shards, logits_nVl.contiguous(), group=group)
        return shards.view(ranks, rows, columns).transpose(0, 1).reshape(rows, ranks * columns)
