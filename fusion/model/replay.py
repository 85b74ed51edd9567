"""Which experts tokens go to, as data: taken from one forward pass, imposed on another.

    engine or trainer    a pass ─ Routed of each layer ─► routing_of ─► experts_NLk, one small integer column
    trainer              experts_NLk ─► Replay ─► a pass whose experts are these, weighed by its own router

Two programs with the same weights round differently. Where two experts are nearly tied that changes a token's experts,
and its log-probability jumps. Replaying the engine's routing in the trainer is R3 (arXiv 2510.11370), replaying the
trainer's own of before the step's first update is R2 (arXiv 2507.18071, "routing replay").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusion.model.collectives import gather_rows, shard_sizes
from fusion.model.mesh import Mesh


class Routed(NamedTuple):
    """What one MoE layer did with this rank's rows.

    Attributes:
        stats: float32 [2, E], tokens that went to each expert (replayed ones included) and the summed probabilities
            that the pass's own router gives it.
        expert_nk: int64 [n, k], where the rows went.
        strayed: float32 scalar, replayed rows whose own router would have chosen another set; None: nothing replayed.
    """

    stats: torch.Tensor
    expert_nk: torch.Tensor
    strayed: torch.Tensor | None = None


class Forced(NamedTuple):
    """Of one layer: int64 [n, k] experts, and bool [n, 1] the rows for which they count; the others choose freely."""

    expert_nk: torch.Tensor
    known_n1: torch.Tensor

    def impose(self, own_nk: torch.Tensor) -> torch.Tensor:
        """int64 [n, k]: where the rows go whose own choice is ``own_nk``."""
        return self.expert_nk.where(self.known_n1, own_nk)

    def strayed(self, own_nk: torch.Tensor) -> torch.Tensor:
        """float32 scalar: rows that count and whose own set of experts is another."""
        other_nk = own_nk.sort(-1).values != self.expert_nk.sort(-1).values
        return (other_nk.any(-1) & self.known_n1.squeeze(1)).sum(dtype=torch.float32)


@dataclass(frozen=True)
class Replay:
    """The routing of one packed batch, on the device.

    Attributes:
        experts_NLk: any integer dtype [N, L, k], for the L layers of this rank's stage; the same on its TP ranks.
        known_N: bool [N], the rows that have a routing; what stands in the others is not looked at.
    """

    experts_NLk: torch.Tensor
    known_N: torch.Tensor

    def of_rank(self, mesh: Mesh) -> Replay:
        """The rows that this TP rank routes."""
        sizes = shard_sizes(len(self.known_N), mesh.parallel.tp)
        rows = slice(sum(sizes[: mesh.tp_rank]), sum(sizes[: mesh.tp_rank + 1]))
        return Replay(self.experts_NLk[rows], self.known_N[rows])

    def layer(self, index: int) -> Forced:
        return Forced(self.experts_NLk[:, index].to(torch.int64), self.known_N.unsqueeze(1))


def routing_dtype(num_experts: int) -> torch.dtype:
    """The smallest integer dtype that holds the number of an expert."""
    return next(d for d in (torch.uint8, torch.int16, torch.int32) if num_experts - 1 <= torch.iinfo(d).max)


@torch.no_grad()
def routing_of(routed: Sequence[Routed], rows: int, mesh: Mesh, num_experts: int) -> torch.Tensor:
    """`routing_dtype` [N, L, k] on the CPU: where all N rows of a pass went, in the layers of this rank's stage.
    Collective over TP."""
    experts_nLk = torch.stack([layer.expert_nk for layer in routed], 1).to(routing_dtype(num_experts))
    # as bytes: not every backend sends every integer
    wire = gather_rows(experts_nLk.flatten(1).view(torch.uint8), rows, mesh)
    return wire.view(experts_nLk.dtype).unflatten(1, experts_nLk.shape[1:]).cpu()
