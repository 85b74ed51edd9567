"""Compute a SwiGLU whose inner channels are split over TP: a dense layer's MLP, or a shared expert."""

import torch
from torch import nn

from fusion.model.collectives import RowSplit, gather_rows, reduce_scatter_rows
from fusion.model.matrix import Weights, parameter, project
from fusion.model.mesh import Mesh
from fusion.npu.operators import Plain


class MLP(nn.Module):
    def __init__(self, mesh: Mesh, operators: Plain, weights: Weights):
        super().__init__()
        self.mesh, self.operators = mesh, operators
        self.gate_up = parameter("gate_up", weights)
        self.down = parameter("down", weights)

    def forward(self, x: torch.Tensor, rows: RowSplit, row_multiple: int) -> torch.Tensor:
        """Return the output [n, D] for this TP rank's rows x [n, D]."""
        return reduce_scatter_rows(self.partial(gather_rows(x, rows, self.mesh), row_multiple), rows, self.mesh)

    def partial(self, x_ND: torch.Tensor, row_multiple: int) -> torch.Tensor:
        """Return what this rank's channels contribute to the output [N, D] of all rows."""
        return project(self.operators.swiglu(project(x_ND, self.gate_up, row_multiple)), self.down, row_multiple)
