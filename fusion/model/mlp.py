"""Compute a SwiGLU whose inner channels are split over TP: a dense layer's MLP, or a shared expert."""

from __future__ import annotations

import torch
from torch import nn

from fusion.model.collectives import gather_rows, reduce_scatter_rows
from fusion.model.matrix import Weights, parameter, project
from fusion.model.mesh import Mesh
from fusion.npu.operators import Plain


class MLP(nn.Module):
    def __init__(self, mesh: Mesh, operators: Plain, weights: Weights):
        super().__init__()
        self.mesh, self.operators = mesh, operators
        self.gate_up = parameter("gate_up", weights)
        self.down = parameter("down", weights)

    def forward(self, x: torch.Tensor, rows: int, row_multiple: int) -> torch.Tensor:
        """Return the output [n, D] for this TP rank's rows x [n, D] of ``rows`` in total."""
        gate_up = project(gather_rows(x, rows, self.mesh), self.gate_up, row_multiple)
        return reduce_scatter_rows(project(self.operators.swiglu(gate_up), self.down, row_multiple), self.mesh)
