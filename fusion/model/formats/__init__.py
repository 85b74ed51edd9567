"""The parameter tables of the programs that hold the model's weights, each by the name of its format. Pure.

    embedded    `Transformer` (fusion.model.table): matrices are cut along their rows to fit units of storage
    megatron    Megatron-Core's GPTModel: a tensor is one parameter and so one unit, however large

A format is all that a switch, a checkpoint or an export needs to know of a model beside its layout.
"""

from __future__ import annotations

from typing import Literal

from fusion.model.config import ModelConfig
from fusion.model.parallel import Parallel
from fusion.model.table import LocalParam, local_params

Format = Literal["embedded", "megatron"]

EMBEDDED: Format = "embedded"
MEGATRON: Format = "megatron"


def local_table(
    format: Format, config: ModelConfig, parallel: Parallel, rank: int, *, max_bytes: int, itemsize: int
) -> tuple[LocalParam, ...]:
    """Return the local tensors of ``rank`` in a format, in the order of the forward pass.

    Args:
        max_bytes: of a unit of storage; formats whose tensors can be cut cut them to fit.
        itemsize: bytes of an element.

    Raises:
        ValueError: the format does not describe this model or layout.
    """
    if format == EMBEDDED:
        return local_params(config, parallel, rank, max_numel=max_bytes // itemsize)
    from fusion.model.formats import megatron

    return megatron.local_params(config, parallel, rank)
