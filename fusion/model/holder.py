"""The seam between whoever computes with weights and whoever loads, moves, compares or exports them."""

from __future__ import annotations

from typing import Protocol

from fusion.model.config import ModelConfig
from fusion.model.mesh import Mesh
from fusion.model.table import LocalParam
from fusion.model.weights import Buckets
from fusion.npu import Device


class WeightHolder(Protocol):
    """One rank's share of a model's weights in one layout. `Transformer` is one; any trainer or engine that can
    describe its local tensors as a table and keep them in `Buckets` can be another.

    Invariant: ``weights.views[param.name]`` has the shape ``param.shape`` for every ``param`` of ``table``, before and
    after its storage was released and allocated again.
    """

    @property
    def config(self) -> ModelConfig:
        """The whole model's shape."""

    @property
    def mesh(self) -> Mesh:
        """The grid that the weights are sharded over; this rank's coordinates and process groups."""

    @property
    def device(self) -> Device:
        """Where `weights` are allocated."""

    @property
    def table(self) -> tuple[LocalParam, ...]:
        """This rank's local tensors in the order of the forward pass: which box of which global tensor lies where."""

    @property
    def weights(self) -> Buckets:
        """The storage of all of `table`, in units that can be released and allocated one by one."""

    @property
    def max_numel(self) -> int:
        """Elements of the largest local matrix: larger ones are cut along their rows (`LocalParam.cut`)."""
