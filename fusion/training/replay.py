"""Replay and record the expert routing of a batch's rows (defined in `fusion.model.replay`).

No log-probability depends on the last token of a sequence: it predicts no token and no token attends to it. An engine
has no routing for it, and a replay leaves it to the trainer's router."""

import torch

from fusion.model import Replay, routing_dtype
from fusion.training.batch import Sequences
from fusion.training.model import TrainedModel


def replay_of(batch: Sequences, model: TrainedModel, own: slice) -> Replay | None:
    """Return the routing to be replayed in a forward pass of the batch's rows ``own``; None if the batch has none.
    Raise ValueError: the routing has another number of sparse layers, or of experts per token, than this stage of the
    model."""
    if batch.routing is None:
        return None
    cell = model.num_sparse_layers, model.config.top_k
    if batch.rows and batch.routing.shape[1:] != cell:
        raise ValueError(f"routing has {list(batch.routing.shape[1:])} (layers, k) per token; expected {list(cell)}")
    device = model.device.torch_device
    routing_MLk = batch.computed(batch.routing.reshape(batch.rows, *cell))
    return Replay(routing_MLk[own].to(device), batch.computed(batch.before_last_N)[own].to(device))


def new_record(sequences: Sequences, model: TrainedModel) -> torch.Tensor:
    """Allocate a tensor for the routing of all rows in the L sparse layers of this stage: `routing_dtype` [N, L, k]."""
    config = model.config
    shape = sequences.rows, model.num_sparse_layers, config.top_k
    return torch.zeros(shape, dtype=routing_dtype(config.num_experts))
