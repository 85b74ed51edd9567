"""Represent a weight matrix as one parameter, or as blocks of rows where it is too large for a storage unit; with a
pair of adapters beside it where it has one."""

from collections.abc import Sequence

import torch
from torch import nn

from fusion.npu.operators import linear

Weights = dict[str, torch.Tensor]
"""Local tensors by name, relative to the module that owns them."""

Stored = nn.Parameter | nn.ParameterList | list[torch.Tensor]
"""A matrix, or its blocks of rows: parameters, or views of them (`rows_of`)"""


class Adapted(nn.Module):
    """A frozen matrix ``base`` and its adapters (`fusion.model.adapters`): A, stacked of as many matrices as there are
    blocks of B, whose outputs are concatenated. Of a stack of experts: stacks [E, r, I] and [E, O, r].

    ``scale``: factor of the adapters' product; 0: they are off, as while a reference computes."""

    def __init__(self, base: Stored, lora_a: nn.Parameter, lora_b: Stored, scale: float = 0.0):
        super().__init__()
        self.base, self.lora_a, self.lora_b, self.scale = base, lora_a, lora_b, scale

    def low_rank(self, x_ND: torch.Tensor, row_multiple: int = 1) -> torch.Tensor:
        """Return scale * B (A x) [N, O]."""
        inner = linear(x_ND, self.lora_a, row_multiple) * self.scale
        blocks = blocks_of(self.lora_b)
        outs = [linear(x, block, row_multiple) for x, block in zip(inner.chunk(len(blocks), -1), blocks, strict=True)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


Matrix = Stored | Adapted


def below(prefix: str, weights: Weights) -> Weights:
    """Return the tensors whose names begin with ``prefix``, without it."""
    return {name[len(prefix) :]: view for name, view in weights.items() if name.startswith(prefix)}


def parameter(name: str, weights: Weights) -> Matrix:
    """Create the matrix ``name`` [O, D]: a parameter, or the list of ``name.0``, ``name.1``, … as the table cuts it,
    with its adapters if it has some."""
    matrix = _stored(name, weights)
    if f"{name}.lora_a" not in weights:
        return matrix
    return Adapted(matrix, nn.Parameter(weights[f"{name}.lora_a"]), _stored(f"{name}.lora_b", weights))


def _stored(name: str, weights: Weights) -> nn.Parameter | nn.ParameterList:
    if name in weights:
        return nn.Parameter(weights[name])
    blocks: list[nn.Parameter] = []
    while f"{name}.{len(blocks)}" in weights:
        blocks.append(nn.Parameter(weights[f"{name}.{len(blocks)}"]))
    assert blocks, f"no weights for {name}"
    return nn.ParameterList(blocks)


def base_of(matrix: Matrix) -> Stored:
    """Return the matrix without its adapters."""
    return matrix.base if isinstance(matrix, Adapted) else matrix


def blocks_of(matrix: Matrix) -> list[torch.Tensor]:
    """Return the matrix's blocks of rows, in order, without its adapters."""
    matrix = base_of(matrix)
    return list(matrix) if isinstance(matrix, (nn.ParameterList, list)) else [matrix]


def places_of(blocks: Sequence[torch.Tensor], rows: range) -> list[tuple[int, slice]]:
    """Return where rows of a matrix lie in its blocks: block and rows of it, in order."""
    places, first = [], 0
    for index, block in enumerate(blocks):
        start, stop = max(rows.start - first, 0), min(rows.stop - first, len(block))
        if start < stop:
            places.append((index, slice(start, stop)))
        first += len(block)
    return places


def rows_of(matrix: Matrix, rows: range) -> Matrix:
    """Return some rows of a matrix, views with gradients, with those of its adapters, of which there is one pair."""
    if isinstance(matrix, Adapted):
        base, lora_b = (_views(stored, rows) for stored in (matrix.base, matrix.lora_b))
        return Adapted(base, matrix.lora_a, lora_b, matrix.scale)
    return _views(matrix, rows)


def _views(matrix: Stored, rows: range) -> list[torch.Tensor]:
    blocks = blocks_of(matrix)
    return [blocks[index][part] for index, part in places_of(blocks, rows)]


def project(x_ND: torch.Tensor, matrix: Matrix, row_multiple: int = 1) -> torch.Tensor:
    """Compute x @ matrix.T [N, O], see `fusion.npu.operators.rows.linear`; with the product of its adapters."""
    if isinstance(matrix, nn.Parameter):
        return linear(x_ND, matrix, row_multiple)
    if isinstance(matrix, Adapted):
        y = project(x_ND, matrix.base, row_multiple)
        return y + matrix.low_rank(x_ND, row_multiple) if matrix.scale else y
    outs = [linear(x_ND, block, row_multiple) for block in matrix]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
