"""The routing of a batch's rows, as the trainer replays and records it (defined in `fusion.model.replay`).

The last token of a sequence predicts nothing and no token attends to it, so where it goes does not matter to any
log-probability: an engine has no routing for it, and a replay leaves it to the trainer's own router.
"""

from __future__ import annotations

import torch

from fusion.model import Replay, Transformer, routing_dtype
from fusion.training.batch import Sequences


def replay_of(batch: Sequences, model: Transformer) -> Replay | None:
    """What a forward pass of the batch has to follow; None where the batch brings no routing.

    Raises:
        ValueError: the routing is of another number of layers or of experts a token than this stage of the model.
    """
    if batch.routing is None:
        return None
    cell = len(model.layers), model.config.top_k
    if batch.rows and batch.routing.shape[1:] != cell:
        raise ValueError(f"routing is of {list(batch.routing.shape[1:])} (layers, k) a token; expected {list(cell)}")
    place = model.device.torch_device
    known_N = torch.ones(batch.rows, dtype=torch.bool)
    known_N[batch.last_rows()] = False
    return Replay(batch.routing.reshape(batch.rows, *cell).to(place), known_N.to(place))


def new_record(sequences: Sequences, model: Transformer) -> torch.Tensor:
    """Room for the routing of all rows in the layers of this rank's stage: `routing_dtype` [N, L, k]."""
    config = model.config
    shape = sequences.rows, len(model.layers), config.top_k
    return torch.zeros(shape, dtype=routing_dtype(config.num_experts))
