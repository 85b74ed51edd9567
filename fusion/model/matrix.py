"""Represent a weight matrix as one parameter, or as blocks of rows where it is too large for a storage unit."""

from __future__ import annotations

import torch
from torch import nn

from fusion.npu.operators import linear

Weights = dict[str, torch.Tensor]
"""Local tensors by name, relative to the module that owns them."""

Matrix = nn.Parameter | nn.ParameterList


def below(prefix: str, weights: Weights) -> Weights:
    """Return the tensors whose names begin with ``prefix``, without it."""
    return {name[len(prefix) :]: view for name, view in weights.items() if name.startswith(prefix)}


def parameter(name: str, weights: Weights) -> Matrix:
    """Create the matrix ``name`` [O, D]: a parameter, or the list of ``name.0``, ``name.1``, … as the table cuts it."""
    if name in weights:
        return nn.Parameter(weights[name])
    blocks: list[nn.Parameter] = []
    while f"{name}.{len(blocks)}" in weights:
        blocks.append(nn.Parameter(weights[f"{name}.{len(blocks)}"]))
    assert blocks, f"no weights for {name}"
    return nn.ParameterList(blocks)


def blocks_of(matrix: Matrix) -> list[torch.Tensor]:
    """Return the matrix's blocks of rows, in order."""
    return list(matrix) if isinstance(matrix, nn.ParameterList) else [matrix]


def project(x_ND: torch.Tensor, matrix: Matrix, row_multiple: int = 1) -> torch.Tensor:
    """Compute x @ matrix.T [N, O], see `fusion.npu.operators.rows.linear`."""
    if isinstance(matrix, nn.Parameter):
        return linear(x_ND, matrix, row_multiple)
    return torch.cat([linear(x_ND, block, row_multiple) for block in matrix], dim=-1)
