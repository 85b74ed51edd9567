"""Define the interface of a trainer as used by the other packages. `EmbeddedTrainEngine` implements it.

A trainer is one rank of a grid of ranks. *Collective* means: called on all ranks of ``model.mesh``, in the same order
of calls. All methods are called on one thread; the result of `state_dict` may be read on another one while no method
runs.

Weights are accessed directly, not by methods: ``model`` is a `WeightHolder` (parameter table and storage), and a switch
moves them in and out of its `Buckets` between two calls."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from fusion.model import Buckets
from fusion.model.holder import WeightHolder
from fusion.training.batch import Sequences
from fusion.training.chunk_files import Chunk
from fusion.training.loss import Loss
from fusion.training.schedule import Schedule

SKIPPED_IN_A_ROW = "training/max_skipped_in_a_row"
"""Metric: number of updates that were skipped since the last one that was not, as their gradients were not finite"""


class TrainEngine(Protocol):
    """One rank of a trainer. Its computing methods need the weights resident in HBM. ``schedule``: of the learning
    rate; a resume may replace it."""

    schedule: Schedule

    @property
    def model(self) -> WeightHolder:
        """The trained weights, in the training layout."""

    # Computing

    def forward_backward(self, sequences: Sequences, loss: Loss, *, continued: bool = False) -> dict[str, float]:
        """Add the gradient of the mean loss over the global batch to the gradients. Collective. ``sequences``: this
        data-parallel rank's part, the same on its TP ranks and on every stage; may be empty. ``continued``: these are
        further sequences of the global batch that was accumulated since the last step; the gradients then hold those of
        the mean over all of it. Return metrics, the same on every rank: means over the trained tokens of the global
        batch, with ``continued`` of all of it that was accumulated since the last step; `actor/loss`."""

    def optimizer_step(self, before_update: Callable[[], None] | None = None) -> dict[str, float]:
        """Update the weights with the gradients accumulated since the last step, and zero them; with
        `training.router_bias_rate` also the routers' correction biases. Collective. ``before_update``: called once,
        before the optimizer's states are first used; they may still be loading from the host until then. Returns
        `actor/grad_norm` (before clipping), `actor/lr` and `SKIPPED_IN_A_ROW`, the same on every rank. If the norm is
        not finite the update is skipped: weights, states and biases are unchanged, and the gradients zeroed. Without
        any sequence since the last step, on all ranks, they are unchanged, too."""

    def logprobs(self, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probabilities and entropies of the tokens, without gradients. Collective. Return two float32
        tensors [N] on the CPU, in the order of ``sequences``, the same on every stage; 0 where `loss_mask` is False."""

    def with_own_routing(self, sequences: Sequences) -> Sequences:
        """Return ``sequences`` with their routing under the current weights, to be replayed under later weights.
        Collective."""

    def using_weights(self, weights: Buckets | None) -> AbstractContextManager[None]:
        """Make the trainer compute with other weights of the same plan as ``model.weights`` until the block ends, such
        as the reference model's; with None, with the base of a model that has adapters. The model's weights are
        unchanged and need not be resident. Not collective."""

    # Memory other than the weights. Every tensor has separate storage, so that an offloader can move it by storage.

    @property
    def accumulating(self) -> bool:
        """Whether the gradients hold a sum that no optimizer step has used yet. If so, their content must be offloaded
        (`gradients`); if not, their memory can be released (`release_gradients`)."""

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Return the live gradient tensors by name: flat, float32, in HBM unless released or offloaded."""

    def release_gradients(self) -> None:
        """Release the gradients' memory. Not while `accumulating`."""

    def allocate_gradients(self) -> None:
        """Allocate the gradients' memory again, zeroed. Not while `accumulating`.
        Raise torch.OutOfMemoryError: there is not enough memory; none was allocated."""

    def optimizer_states(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors of the optimizer by name, flat and float32, in HBM or on the host. Call again before
        every use.

        If the weights are not float32, ``master.<i>`` is the float32 master of this rank's shard of gradient bucket i,
        as `fusion.training.shards` defines it: a switch to training may round weights from the masters."""

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: ``tensors``, the live weights and optimizer states by name, which must be
        resident, in HBM or on the host; ``steps``; and ``skipped_in_a_row``, the last `SKIPPED_IN_A_ROW`."""

    def chunks(self, state: dict[str, Any]) -> list[Chunk]:
        """Return this rank's part of what a checkpoint needs, in a `state_dict` or a copy of one: boxes of global
        tensors, whose names and shapes are the same in every layout. Over all ranks the owned chunks cover every
        element of every global tensor once. `master/NAME` holds the weights that are exported as the Hugging Face
        tensor NAME. Can be called on any thread."""

    def resume_at(self, steps: int, skipped_in_a_row: int) -> None:
        """Continue from the live `chunks`, all of which were overwritten with the values of a checkpoint: derive all
        other state from them, and set the numbers of optimizer steps, and of those skipped in a row. Collective."""

    def weight_views(self, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the weights in a copy of `state_dict` by the names of ``model.table``, each in its local shape, as
        views of the copy. Can be called on any thread."""
