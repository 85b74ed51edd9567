"""Replay and record the expert routing of a batch's rows (defined in `fusion.model.replay`).

No log-probability depends on the last token of a sequence: it predicts no token and no token attends to it. An engine
has no routing for it. A replay leaves it to the trainer's router where the balancing of experts counts it; elsewhere
the host chooses its experts, so that it knows those of all rows before the pass (`fusion.model.exchange`)."""

import torch

from fusion.model import Replay, routing_dtype
from fusion.training.batch import Sequences
from fusion.training.model import TrainedModel


def replay_of(batch: Sequences, model: TrainedModel, own: slice, complete: bool) -> Replay | None:
    """Return the routing to be replayed in a forward pass of the batch's rows ``own``; None if the batch has none.
    ``complete``: where experts are split over ranks, last tokens need not follow their router.
    Raise ValueError: the routing has another number of sparse layers, or of experts per token, than this stage of the
    model."""
    if batch.routing is None:
        return None
    cell = model.num_sparse_layers, model.config.top_k
    if batch.rows and batch.routing.shape[1:] != cell:
        raise ValueError(f"routing has {list(batch.routing.shape[1:])} (layers, k) per token; expected {list(cell)}")
    routing_MLk = batch.computed(batch.routing.reshape(batch.rows, *cell))[own]
    known_M = batch.computed(batch.before_last_N)[own]
    if complete:
        any_M1k = torch.arange(len(known_M) * cell[1]).view(-1, 1, cell[1]) % model.config.num_experts
        routing_MLk = routing_MLk.where(known_M.view(-1, 1, 1), any_M1k.to(routing_MLk.dtype))
    return Replay(routing_MLk, known_M, complete)


def new_record(sequences: Sequences, model: TrainedModel) -> torch.Tensor:
    """Allocate a tensor for the routing of all rows in the L sparse layers of this stage: `routing_dtype` [N, L, k]."""
    config = model.config
    shape = sequences.rows, model.num_sparse_layers, config.top_k
    return torch.zeros(shape, dtype=routing_dtype(config.num_experts))
