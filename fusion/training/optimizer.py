"""AdamW with its states sharded over the replicas of each bucket (ZeRO-1, arXiv 1910.02054), and its gradients.

    gradients (fp32, whole buckets) ─ sum over TP of what TP replicates ─ reduce-scatter over dp or edp ─► own shard
    own shard ─ norm over all ranks, clip ─ AdamW on fp32 masters ─► weights' shard ─ all-gather ─► weights

Every state lies in storage of its own, one flat tensor a bucket (`tensors`), which may be released and taken back with
`untyped_storage().resize_()`; all else are views. With fp32 weights the weights are the masters and there is no copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from fusion.model import Buckets, Mesh
from fusion.npu import Device
from fusion.training.shards import Run, shard_range, shard_runs

EPSILON = 1e-8


@dataclass
class _Shard:
    """One bucket as this rank's optimizer sees it. Tensors are float32 views or flats of the shard's size."""

    start: int
    runs: list[Run]
    group: dist.ProcessGroup | None
    whole_weight: torch.Tensor
    whole_gradient: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def cut(self, tensor: torch.Tensor, run: Run) -> torch.Tensor:
        return tensor[run.start - self.start : run.stop - self.start]


class ShardedAdamW:
    """Owns the gradients of ``weights`` (float32, the same geometry) and the optimizer's states.

    The masters are taken from the weights as they are now; `take_masters` takes them again after weights were loaded.
    All ranks of the mesh call `step` together.
    """

    def __init__(
        self,
        weights: Buckets,
        mesh: Mesh,
        device: Device,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        clip_grad: float = 0.0,
    ):
        self.weights, self.mesh = weights, mesh
        self.betas, self.weight_decay, self.clip_grad = betas, weight_decay, clip_grad
        self.steps = 0
        self.gradients = Buckets(weights.plans, device, torch.float32, owner="gradients")
        with device.owner("optimizer"):
            self.shards = [self._shard(index) for index in range(len(weights.plans))]
        self.take_masters()
        replicated = [p.name for plan in weights.plans for p, _ in plan.entries if not (p.expert or p.tp_sharded)]
        self._replicated = [self.gradients.views[name] for name in replicated]

    def _shard(self, index: int) -> _Shard:
        plan, weight, gradient = self.weights.plans[index], self.weights.flats[index], self.gradients.flats[index]
        mesh = self.mesh
        replicas, replica = (mesh.parallel.edp, mesh.edp_rank) if plan.expert else (mesh.parallel.dp, mesh.dp_rank)
        start, stop = shard_range(plan, replicas, replica)
        mine = weight[start:stop]
        return _Shard(
            start,
            shard_runs(plan, start, stop),
            mesh.edp_group if plan.expert else mesh.dp_group,
            weight,
            gradient,
            mine,
            gradient[start:stop],
            mine if mine.dtype == torch.float32 else torch.empty_like(mine, dtype=torch.float32),
            torch.zeros_like(mine, dtype=torch.float32),
            torch.zeros_like(mine, dtype=torch.float32),
        )

    def take_masters(self) -> None:
        """Copies the weights into the fp32 masters (nothing to do for fp32 weights)."""
        for shard in self.shards:
            if shard.master is not shard.weight:
                shard.master.copy_(shard.weight)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor the optimizer holds besides the gradients, each in storage of its own."""
        held: dict[str, torch.Tensor] = {}
        for index, shard in enumerate(self.shards):
            if shard.master is not shard.weight:
                held[f"master.{index}"] = shard.master
            held[f"exp_avg.{index}"], held[f"exp_avg_sq.{index}"] = shard.exp_avg, shard.exp_avg_sq
        return held

    def zero_gradients(self) -> None:
        for flat in self.gradients.flats:
            flat.zero_()

    def step(self, lr: float) -> float:
        """One step from the gradients summed so far, which it zeroes. Returns their norm before clipping.

        Raises:
            FloatingPointError: on all ranks, where the norm is not finite; nothing was changed.
        """
        self._sum_over_tp()
        for shard in self.shards:
            self._reduce(shard)
        norm = self._norm()
        if not torch.isfinite(torch.tensor(norm)):
            raise FloatingPointError(f"optimizer step {self.steps}: the norm of the gradient is {norm}")
        if 0 < self.clip_grad < norm:
            torch._foreach_mul_([shard.gradient for shard in self.shards], self.clip_grad / (norm + 1e-6))
        self._update(lr)
        for shard in self.shards:
            self._publish(shard)
        self.zero_gradients()
        return norm

    def _sum_over_tp(self) -> None:
        # Each TP rank saw its own rows of norms and router, and its own heads of the q and k norms: partial sums.
        if self.mesh.tp_group is None:
            return
        wire = torch.cat([gradient.flatten() for gradient in self._replicated])
        dist.all_reduce(wire, group=self.mesh.tp_group)
        pieces = wire.split([gradient.numel() for gradient in self._replicated])
        for gradient, piece in zip(self._replicated, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))

    def _reduce(self, shard: _Shard) -> None:
        if shard.group is None:
            return
        summed = torch.empty_like(shard.gradient)
        dist.reduce_scatter_tensor(summed, shard.whole_gradient, group=shard.group)
        shard.gradient.copy_(summed)

    def _norm(self) -> float:
        counted = [
            shard.cut(shard.gradient, run)
            for shard in self.shards
            for run in shard.runs
            if not run.replicated or self.mesh.tp_rank == 0
        ]
        norms = torch._foreach_norm(counted) if counted else [torch.zeros(())]
        square = torch.stack(norms).to("cpu", torch.float64).square().sum()
        if self.mesh.world_group is not None:
            dist.all_reduce(square, group=self.mesh.world_group)
        return float(square.sqrt())

    def _update(self, lr: float) -> None:
        for decay in (True, False):
            cuts = [(shard, run) for shard in self.shards for run in shard.runs if run.decay == decay]
            if not cuts:
                continue
            adamw(
                [shard.cut(shard.master, run) for shard, run in cuts],
                [shard.cut(shard.gradient, run) for shard, run in cuts],
                [shard.cut(shard.exp_avg, run) for shard, run in cuts],
                [shard.cut(shard.exp_avg_sq, run) for shard, run in cuts],
                [],
                [torch.tensor(float(self.steps)) for _ in cuts],
                foreach=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=self.weight_decay if decay else 0.0,
                eps=EPSILON,
                maximize=False,
            )
        self.steps += 1

    def _publish(self, shard: _Shard) -> None:
        if shard.master is not shard.weight:
            shard.weight.copy_(shard.master)
        if shard.group is not None:
            dist.all_gather_into_tensor(shard.whole_weight, shard.weight, group=shard.group)
