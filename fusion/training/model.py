"""Define the interface of a model that the train engine trains: `Transformer`, or another trainer's in `backends`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from fusion.model import Head, Replay, Routed, WeightHolder
from fusion.model.attention import Attend


class TrainedModel(WeightHolder, Protocol):
    """Compute one rank's shard of a model, with gradients for the parameters that `named_parameters` yields."""

    recompute: bool
    """Whether the backward pass recomputes the activations of each layer"""

    @property
    def head(self) -> Head:
        """The head, which computes logits from hidden states. On the last stage."""

    @property
    def num_sparse_layers(self) -> int:
        """Number of layers of this stage that have experts."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, which are views of `weights`, by the names of `table`."""

    def __call__(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        attend: Attend,
        routed: list[Routed] | None = None,
        hidden: torch.Tensor | None = None,
        replay: Replay | None = None,
    ) -> torch.Tensor:
        """Compute the hidden states [N, D] of a packed batch, or of this rank's rows of it (`context_rows`), after the
        final norm; on other stages than the last, this TP rank's rows [n, D] before it."""

    def adapters_off(self) -> AbstractContextManager[None]:
        """Compute with the base alone during the block. Of a model with adapters."""

    def keep_probabilities(self) -> None:
        """Keep the router's probabilities of each row in `Routed`, for the load-balancing loss of sequences."""

    def hidden_rows(self, rows: int) -> int:
        """Return how many rows of a batch of ``rows`` this TP rank holds between two blocks and between two stages."""

    def own_rows(self, rows: int) -> range:
        """Return which rows of a batch of ``rows`` this TP rank routes, in the order of `Routed`, without padding."""

    def routing_of(self, routed: list[Routed], rows: int) -> torch.Tensor:
        """Return the experts of all N rows of a batch in the L sparse layers of this stage: `routing_dtype` [N, L, k]
        on the CPU. Collective over TP and context parallel."""
