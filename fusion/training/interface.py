"""What the rest of the house may ask of a trainer. `EmbeddedTrainEngine` is the implementation of this house.

A trainer is one rank of a grid of ranks. *Collective* means: over all ranks of ``model.mesh``, in the same order of
calls. Everything is called on one thread, except `state_dict`'s result, which another thread may read while nothing
else is called.

The weights themselves are not behind methods: ``model`` is the seam (`WeightHolder`: parameter table and storage), and
a switch moves them in and out of its `Buckets` between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fusion.model import Buckets
from fusion.model.holder import WeightHolder
from fusion.training.batch import Sequences
from fusion.training.loss import Loss


class TrainEngine(Protocol):
    """One rank of a trainer. Its computing methods need the weights resident in HBM."""

    @property
    def model(self) -> WeightHolder:
        """The weights that are trained, in the training layout."""

    # Computing

    def forward_backward(self, sequences: Sequences, loss: Loss) -> dict[str, float]:
        """Adds the gradient of the mean loss over the global batch to the gradients. Collective.

        Args:
            sequences: this data-parallel rank's part, the same on its TP ranks and on every stage; may be empty.

        Returns:
            metrics, the same on every rank: means over the trained tokens of the global batch; `actor/loss`.
        """

    def optimizer_step(self, before_update: Callable[[], None] | None = None) -> dict[str, float]:
        """Updates the weights with the gradients accumulated since the last step, and zeroes them. Collective.

        Args:
            before_update: called once, before the optimizer's states are first used: they may still be on their way
                from the host until then.

        Returns:
            `actor/grad_norm` (before clipping) and `actor/lr`, the same on every rank.

        Raises:
            FloatingPointError: on all ranks, where the gradient is not finite; nothing was changed.
        """

    def logprobs(self, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes log-probabilities and entropies of the tokens, without gradients. Collective.

        Returns:
            two float32 tensors [N] on the CPU, in the order of ``sequences``, the same on every stage; 0 where
            `loss_mask` is False.
        """

    def with_own_routing(self, sequences: Sequences) -> Sequences:
        """Returns ``sequences`` with the experts that the present weights choose, for later weights to replay.
        Collective."""

    def using_weights(self, weights: Buckets) -> AbstractContextManager[None]:
        """Inside, computes with other weights of the same plan as ``model.weights``, which stay untouched and need not
        be resident: those of the reference model. Not collective."""

    # Memory beside the weights. Every tensor lies in storage of its own, so that an offloader can move it by storage.

    @property
    def accumulating(self) -> bool:
        """Whether the gradients hold a sum that no optimizer step has used yet. Then they can leave HBM only with their
        content (`gradients`), else as memory (`release_gradients`)."""

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The live gradient tensors by name: flat, float32, in HBM unless released or offloaded."""

    def release_gradients(self) -> None:
        """Gives the gradients' memory back to the device. Not while `accumulating`."""

    def allocate_gradients(self) -> None:
        """Takes the gradients' memory again, zeroed. Not while `accumulating`.

        Raises:
            torch.OutOfMemoryError: there is no room; none was taken.
        """

    def optimizer_states(self) -> Mapping[str, torch.Tensor]:
        """The live tensors of the optimizer by name, flat and float32, in HBM or on the host. Ask again before every
        use.

        Where the weights are not float32, ``master.<i>`` is the float32 master of this rank's shard of gradient bucket
        i, as `fusion.training.shards` cuts it: a switch to training may round weights from them.
        """

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: ``tensors``, weights and optimizer by name, live; ``steps``. Everything is resident, in
        HBM or on the host."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies the `state_dict` of the same layout and rank in, bit for bit.

        Raises:
            ValueError: it is of another model, layout or dtype.
        """

    def weight_views(self, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The weights in a copy of `state_dict` by the names of ``model.table``, each in its local shape: views of the
        copy, which no later step changes. Any thread."""
