"""Define the interface of a model whose weights are loaded, resharded, compared and exported."""

from typing import Protocol

from fusion.model.bucket_plan import unit_bytes
from fusion.model.config import ModelConfig
from fusion.model.formats import Format, local_table
from fusion.model.local_param import LocalParam
from fusion.model.mesh import Mesh
from fusion.model.weights import Buckets
from fusion.npu import Device


class WeightHolder(Protocol):
    """Hold one rank's shard of a model's weights in one layout. `Transformer` implements it; so can any trainer or
    engine whose local tensors `formats` describes, and that keeps them in `Buckets`.

    Invariant: ``weights.views[param.name]`` has the shape ``param.shape`` for every ``param`` of ``table``, before and
    after its storage is released and reallocated."""

    config: ModelConfig
    """The shape of the whole model."""
    mesh: Mesh
    """The grid of ranks that the weights are sharded over, with this rank's coordinates and process groups."""
    device: Device
    """Where `weights` are allocated."""
    table: tuple[LocalParam, ...]
    """This rank's local tensors in the order of the forward pass: which box of which global tensor is stored
    where, and which lie apart from the units (`LocalParam.storage`)."""
    weights: Buckets
    """The storage of every parameter of `table`, most of it in units that can be released and allocated one by one."""
    format: Format
    """The name of the format of `table`: `table_of` returns every rank's."""
    bucket_bytes: int
    """Upper bound on the bytes of a bucket; determines the size of the units of `weights` (`unit_bytes`)."""


def table_of(model: WeightHolder, rank: int) -> tuple[LocalParam, ...]:
    """Return the table of any ``rank`` of a model's layout."""
    return local_table(
        model.format,
        model.config,
        model.mesh.parallel,
        rank,
        max_bytes=unit_bytes(model.bucket_bytes),
        itemsize=model.weights.dtype.itemsize,
    )
