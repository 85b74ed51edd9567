"""Update weights by AdamW, with states sharded over the replicas of each bucket (ZeRO-1, arXiv 1910.02054).

    gradients (fp32, whole buckets) ─ sum shared elements over TP or etp ─ reduce-scatter over dp or edp ─► own shard
    own shard ─ sum tied embeddings over both ends of the pipeline ─ norm over all ranks, clip
              ─ AdamW on fp32 masters ─► pieces of the weights ─ all-gather ─► weights

Gradients are stored in large buckets for efficient collectives, weights in the small units that a switch moves. A
shard is a contiguous range of a bucket; gradients and weights are matched parameter by parameter (`shards.Piece`).
Every kind of state has one flat tensor per bucket with separate storage, and a step processes the buckets one by one,
in HBM or streamed from the host (`states`). With fp32 weights the weights are the masters and there is no copy.

Invariant: ranks that hold the same element of the model hold bitwise equal values after every step. Replicas receive
the value from one of them; ranks that compute it have equal gradients at equal places in their shards. Tied embeddings,
of which the first and the last stage have a copy each, are in separate buckets for this reason."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from fusion.model import BucketPlan, Buckets, WeightHolder, global_params, table_of
from fusion.npu.operators import AdamW, AdamWStates
from fusion.training.chunk_files import Chunk
from fusion.training.shards import (
    Piece,
    ShardBox,
    SharedElements,
    Wire,
    gradient_buckets,
    own_range,
    shard_pieces,
    untrained_parts,
)
from fusion.training.states import MakeStates, ResidentStates, StateGroups, States

EPSILON = 1e-8


@dataclass
class _Shard:
    """This rank's shard of one bucket. ``gradient``: float32, flat, of the shard's size."""

    plan: BucketPlan
    start: int
    stop: int
    pieces: list[Piece]
    counted: list[tuple[int, int]]
    """(start, stop) runs of the shard that this rank adds to the norm."""
    boxes: list[ShardBox]
    """The pieces as boxes of global tensors; owned where no other rank's shard is to save them"""
    wire: Wire
    tied: bool
    group: dist.ProcessGroup | None
    whole_gradient: torch.Tensor
    gradient: torch.Tensor

    @staticmethod
    def cut(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
        return flat[piece.at : piece.at + piece.numel]


def shared_elements(model: WeightHolder, axis: Literal["tp", "etp"]) -> SharedElements:
    """Return the elements that several ranks of this rank's group along an axis hold: with ``etp`` those of experts."""
    mesh = model.mesh
    ranks = next(group for group in mesh.parallel.groups(axis) if mesh.rank in group)
    tables = [table_of(model, rank) for rank in ranks]
    return SharedElements(tables, mesh.parallel.coordinate(axis, mesh.rank), expert=axis == "etp")


class ShardedAdamW:
    """Own the gradients of ``model`` (float32) and the optimizer's states.

    The masters are copied from the weights at construction; `take_masters` copies them again after weights were loaded.
    All ranks of the mesh call `step` together. ``steps``: number of updates. ``skipped_in_a_row``: number of updates
    that were skipped since the last one, as the gradient was not finite."""

    def __init__(
        self,
        model: WeightHolder,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        clip_grad: float = 0.0,
        states: MakeStates = ResidentStates,
    ):
        self.weights, self.mesh, self.device = model.weights, model.mesh, model.device
        self.betas, self.weight_decay, self.clip_grad = betas, weight_decay, clip_grad
        self.steps = self.skipped_in_a_row = 0
        config, parallel = model.config, model.mesh.parallel
        plans, tied = gradient_buckets(config, parallel, model.table, bucket_bytes=model.bucket_bytes)
        self.gradients = Buckets(plans, self.device, torch.float32, owner="gradients")
        self._shared = shared_elements(model, "tp")
        # Without adapters, no two ranks hold the same elements of an expert that is split over them.
        self._shared_of_experts = (
            shared_elements(model, "etp") if config.adapters and parallel.etp > 1 else self._shared
        )
        self.shards = [self._shard(index, index >= len(plans) - tied) for index in range(len(plans))]
        masters = [] if self.weights.dtype == torch.float32 else ["master"]
        kinds = [*masters, "exp_avg", "exp_avg_sq"]
        self.states: StateGroups = states(
            self.device, [dict.fromkeys(kinds, shard.stop - shard.start) for shard in self.shards]
        )
        self._shapes = global_params(config)
        # With adapters all that is not trained is of the base, which is loaded from its folder.
        self._untrained = [] if config.adapters else [param for param in model.table if not param.trained]
        self.take_masters()

    def _shard(self, index: int, tied: bool) -> _Shard:
        plan, gradient, mesh = self.gradients.plans[index], self.gradients.flats[index], self.mesh
        shared = self._shared_of_experts if plan.expert else self._shared
        start, stop = own_range(plan, mesh.parallel, mesh.rank)
        pieces = shard_pieces(plan, start, stop)
        boxes = [box for piece in pieces for box in shared.boxes(piece)]
        copied = tied and mesh.first_stage  # from the last stage
        return _Shard(
            plan=plan,
            start=start,
            stop=stop,
            pieces=pieces,
            counted=[] if copied else [span for piece in pieces for span in shared.counted(piece)],
            boxes=[replace(box, owned=False) for box in boxes] if copied else boxes,
            wire=shared.wire(plan),
            tied=tied,
            group=mesh.edp_group if plan.expert else mesh.dp_group,
            whole_gradient=gradient,
            gradient=gradient[start:stop],
        )

    def _weight(self, piece: Piece) -> torch.Tensor:
        return self.weights.views[piece.param.name].flatten()[piece.start : piece.stop]

    def _master(self, states: States, piece: Piece) -> torch.Tensor:
        return _Shard.cut(states["master"], piece) if "master" in states else self._weight(piece)

    def take_masters(self) -> None:
        """Copy the weights into the fp32 masters (nothing to do for fp32 weights)."""
        if self.weights.dtype == torch.float32:
            return
        for index, states in self.states:
            for piece in self.shards[index].pieces:
                self._master(states, piece).copy_(self._weight(piece))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the optimizer except the gradients by name (`exp_avg.3`), with separate storage."""
        return self.states.tensors()

    def chunks(self, tensors: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> Iterator[Chunk]:
        """Yield this rank's shard as boxes of the global tensors `master/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME`
        (float32), each a view of `tensors`, or copies of them; and of the weights by local name, which are the masters
        if they are float32."""
        for index, shard in enumerate(self.shards):
            for box in shard.boxes:
                offset = tuple(start for start, _ in box.region)
                for kind in ("master", "exp_avg", "exp_avg_sq"):
                    flat = tensors.get(f"{kind}.{index}")
                    at = box.start if flat is None else box.at
                    flat = weights[box.piece.param.name].flatten() if flat is None else flat
                    yield Chunk(
                        name=f"{kind}/{box.name}",
                        shape=self._shapes[box.name],
                        offset=offset,
                        tensor=flat[at : at + box.numel].view(box.shape),
                        owned=box.owned,
                    )

    def untrained_chunks(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Chunk]:
        """Yield this rank's parameters without gradients as boxes of the global tensors `master/NAME`, in the dtype
        that they are kept in, each a view of ``weights`` (as of `chunks`)."""
        for param, part, owned in untrained_parts(self._untrained, self._shared, self.mesh.rank):
            yield Chunk(
                name=f"master/{part.name}",
                shape=self._shapes[part.name],
                offset=tuple(start for start, _ in part.region),
                tensor=part.view(weights[param.name]),
                owned=owned,
            )

    def publish(self) -> None:
        """Copy the masters to the weights, on all replicas. Collective."""
        for index, states in self.states:
            self._publish(self.shards[index], states)

    def zero_gradients(self) -> None:
        for flat in self.gradients.flats:
            flat.zero_()

    def step(self, lr: float, before_update: Callable[[], None] | None = None, *, updates: bool = True) -> float:
        """Update the weights with the accumulated gradients and zero these, as `TrainEngine.optimizer_step`. Returns
        their norm before clipping; if it is not finite, ``skipped_in_a_row`` grows. ``updates``: False: there are no
        gradients, and weights and states stay."""
        for shard in self.shards:
            self._reduce(shard)
        norm = self._norm()
        self.skipped_in_a_row = 0 if math.isfinite(norm) else self.skipped_in_a_row + 1
        if self.shards and 0 < self.clip_grad < norm and not self.skipped_in_a_row:
            torch._foreach_mul_([shard.gradient for shard in self.shards], self.clip_grad / (norm + 1e-6))
        if before_update is not None:
            before_update()
        if updates and not self.skipped_in_a_row:
            for index, states in self.states:
                self._update(self.shards[index], states, lr)
                self._publish(self.shards[index], states)
            self.steps += 1
        self.zero_gradients()
        return norm

    def _reduce(self, shard: _Shard) -> None:
        """Sum the shard's gradient over all ranks, which makes it the gradient of the whole batch."""
        if shard.wire.numel:
            wire = shard.gradient.new_zeros(shard.wire.numel)
            views = [self.gradients.views[piece.param.name].flatten() for piece in shard.wire.pieces]
            for view, piece in zip(views, shard.wire.pieces, strict=True):
                shard.cut(wire, piece).copy_(view[piece.start : piece.stop])
            dist.all_reduce(wire, group=self.mesh.etp_group if shard.plan.expert else self.mesh.tp_group)
            for view, piece in zip(views, shard.wire.pieces, strict=True):
                view[piece.start : piece.stop].copy_(shard.cut(wire, piece))
        if shard.group is not None:
            summed = torch.empty_like(shard.gradient)
            dist.reduce_scatter_tensor(summed, shard.whole_gradient, group=shard.group)
            shard.gradient.copy_(summed)
        if shard.tied:
            dist.all_reduce(shard.gradient, group=self.mesh.ends_group)

    def _norm(self) -> float:
        counted = [shard.gradient[start:stop] for shard in self.shards for start, stop in shard.counted]
        norms = torch._foreach_norm(counted) if counted else [torch.zeros(())]
        square = torch.stack(norms).to("cpu", torch.float64).square().sum()
        if self.mesh.world_group is not None:
            dist.all_reduce(square, group=self.mesh.world_group)
        return float(square.sqrt())

    def _update(self, shard: _Shard, states: States, lr: float) -> None:
        for decay in (True, False):
            pieces = [piece for piece in shard.pieces if piece.decay == decay]
            if not pieces:
                continue
            self.device.operators.adamw(
                AdamWStates(
                    [self._master(states, piece) for piece in pieces],
                    [shard.cut(shard.gradient, piece) for piece in pieces],
                    [shard.cut(states["exp_avg"], piece) for piece in pieces],
                    [shard.cut(states["exp_avg_sq"], piece) for piece in pieces],
                ),
                AdamW(self.steps, lr, self.betas, weight_decay=self.weight_decay if decay else 0.0, eps=EPSILON),
            )

    def _publish(self, shard: _Shard, states: States) -> None:
        """Copy the masters to this rank's pieces of the weights, and those to every replica."""
        if shard.group is None:
            if "master" in states:
                for piece in shard.pieces:
                    self._weight(piece).copy_(self._master(states, piece))
            return
        with self.device.owner("buckets"):
            wire = torch.empty(shard.plan.numel, dtype=self.weights.dtype, device=self.device.torch_device)
        own = wire[shard.start : shard.stop]
        for piece in shard.pieces:
            shard.cut(own, piece).copy_(self._master(states, piece))
        dist.all_gather_into_tensor(wire, own, group=shard.group)
        for param, offset in shard.plan.entries:
            self.weights.views[param.name].copy_(wire[offset : offset + param.numel].view(param.shape))
