"""Define the interface of a model whose weights are loaded, resharded, compared and exported."""

from __future__ import annotations

from typing import Protocol

from fusion.model.config import ModelConfig
from fusion.model.local_param import LocalParam
from fusion.model.mesh import Mesh
from fusion.model.weights import Buckets
from fusion.npu import Device


class WeightHolder(Protocol):
    """Holds one rank's shard of a model's weights in one layout. `Transformer` implements it; so can any trainer or
    engine that describes its local tensors as a table and keeps them in `Buckets`.

    Invariant: ``weights.views[param.name]`` has the shape ``param.shape`` for every ``param`` of ``table``, before and
    after its storage is released and reallocated.
    """

    @property
    def config(self) -> ModelConfig:
        """The shape of the whole model."""

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks that the weights are sharded over, with this rank's coordinates and process groups."""

    @property
    def device(self) -> Device:
        """Where `weights` are allocated."""

    @property
    def table(self) -> tuple[LocalParam, ...]:
        """This rank's local tensors in the order of the forward pass: which box of which global tensor is stored
        where, and which lie apart from the units (`LocalParam.storage`)."""

    @property
    def weights(self) -> Buckets:
        """The storage of every parameter of `table`, most of it in units that can be released and allocated one by
        one."""

    @property
    def max_numel(self) -> int:
        """Upper bound on the elements of a local matrix: larger ones are cut along their rows (`LocalParam.cut`)."""
