"""Balance the load of experts without a loss: move the correction bias of each router against it.

    rows of each expert, per layer, of the global batch ─► sign of (mean − rows) · rate ─► added to the bias

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): the bias decides which experts a token is sent to and not how their
outputs are weighed, so no gradient reaches it. It moves once per optimizer step, by the rows of all batches that the
step was computed from; replayed rows count where they were sent.

Invariants: rows are counted in integers and summed over all ranks, so every rank computes the same bias, bitwise, of
every layer and in every layout that routes alike. The rate 0 changes no bit."""

import torch
import torch.distributed as dist

from fusion.model import Routed
from fusion.training.model import TrainedModel


def bias_steps(rows_SE: torch.Tensor) -> torch.Tensor:
    """Return +1 for experts with fewer rows than their layer's mean, -1 for those with more, else 0: int64 [S, E].
    ``rows_SE``: int64, rows of each expert by sparse layer."""
    return (rows_SE.sum(-1, keepdim=True) - rows_SE.shape[-1] * rows_SE).sign()


class RouterBias:
    """Counts the rows of experts and updates the correction biases of ``model`` (`Buckets.card`, of all its layers).
    ``rate``: what a bias moves by in a step; 0: nothing is counted and nothing changes."""

    def __init__(self, model: TrainedModel, rate: float):
        config, mesh = model.config, model.mesh
        assert not rate or model.weights.card.numel(), "the model's routers have no correction bias"
        self._model, self._mesh, self.rate = model, mesh, rate
        own_layers = mesh.parallel.layers(config.num_layers, mesh.pp_rank)
        self._own_rows = slice(config.sparse(own_layers).start, config.sparse(own_layers).stop)
        self._rows_SE = torch.zeros(config.num_sparse_layers, config.num_experts, dtype=torch.int64)
        self._batches: list[torch.Tensor] = []

    def count(self, routed: list[Routed]) -> None:
        """Add the rows of one micro-batch of this rank, in the sparse layers of its stage."""
        if self.rate and routed:
            self._batches.append(torch.stack([layer.stats[0] for layer in routed]).detach())

    def collect(self) -> None:
        """Bring what was counted to the host, where it stays until `update`: the card may have other work before."""
        for batch in self._batches:
            self._rows_SE[self._own_rows] += batch.to("cpu", torch.int64)
        self._batches.clear()

    def update(self, *, skipped: bool = False) -> None:
        """Move the biases by the load since the last update; where that was ``skipped``, only forget the load.
        Collective over the mesh."""
        if not self.rate or skipped:
            self._rows_SE.zero_()
            return
        if self._mesh.world_group is not None:
            dist.all_reduce(self._rows_SE, group=self._mesh.world_group)
        biases_SE = self._model.weights.card.view(self._rows_SE.shape)
        biases_SE += self.rate * bias_steps(self._rows_SE).to(biases_SE.device, torch.float32)
        self._rows_SE.zero_()
