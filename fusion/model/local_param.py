"""Describe a local tensor of a rank: which boxes of which global tensors it is made of, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal

from fusion.model.boxes import Box, numel, outside

if TYPE_CHECKING:
    import torch

Storage = Literal["unit", "card", "host"]
"""Where a local tensor lies: in a ``unit`` of the weights, which is trained, released and moved; on the ``card``, apart
from the units and resident in every phase; or on the ``host`` of the ranks that train."""


@dataclass(frozen=True)
class Part:
    """Map a box of the global tensor ``name`` to its place in a local tensor.

    ``local`` has one range for each dimension of the local tensor, which may have more leading dimensions of size one
    than the global tensor (one expert of a stack). ``transposed``: the last two dimensions are stored swapped."""

    name: str
    region: Box
    local: Box
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)

    def view(self, local_tensor: torch.Tensor) -> torch.Tensor:
        """Return the part's elements as a view in the global orientation, shape `Part.shape`."""
        view = local_tensor[tuple(slice(start, stop) for start, stop in self.local)]
        for _ in range(view.dim() - len(self.region)):
            view = view.squeeze(0)
        return view.transpose(-1, -2) if self.transposed else view

    def rows(self, start: int, stop: int) -> Part | None:
        """Return the part within rows [start, stop) of the local tensor, placed in a tensor of these rows alone; None
        if it has no element there."""
        first, last = self.local[0]
        a, b = max(first, start), min(last, stop)
        if a >= b:
            return None
        region = list(self.region)
        if len(self.local) == len(region):  # else the local rows are not a dimension of the global tensor
            dim = 1 if self.transposed and len(region) == 2 else 0
            base = region[dim][0] - first
            region[dim] = a + base, b + base
        return replace(self, region=tuple(region), local=((a - start, b - start), *self.local[1:]))


@dataclass(frozen=True)
class LocalParam:
    """Describe a local tensor. All that other packages need to know of it is in its fields; its name is its owner's.
    Only tensors in units have gradients and optimizer states, unless they are frozen.
    ``expert``: it is replicated over edp, not dp.
    ``tp_sharded``: TP ranks hold different elements.
    ``row_group``: number of rows that `cut` keeps together.
    ``storage``: where it lies.
    ``float32``: it is kept in float32, whatever the weights' dtype.
    ``layer``: its layer in the whole model; None: it belongs to no layer.
    ``expert_index``: the expert in the whole model of which it holds a matrix; None: it holds none, or several experts.
    ``block``: its number among the blocks that a matrix was cut into; None: it is not cut.
    ``frozen``: it is of a base that is never trained (`adapters`).
    ``stack``: the stack of equal matrices, one for each expert of the rank, in which it is stored, whole; None: none.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    expert: bool = False
    tp_sharded: bool = False
    row_group: int = 1
    storage: Storage = "unit"
    float32: bool = False
    layer: int | None = None
    expert_index: int | None = None
    block: int | None = None
    stack: str | None = None
    frozen: bool = False

    @property
    def trained(self) -> bool:
        """Whether it has gradients and optimizer states."""
        return self.storage == "unit" and not self.frozen

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def holes(self) -> tuple[Box, ...]:
        """Boxes of the local tensor that no part fills: padding."""
        if sum(numel(part.local) for part in self.parts) == self.numel:
            return ()
        pieces: list[Box] = [tuple((0, size) for size in self.shape)]
        for part in self.parts:
            pieces = [rest for piece in pieces for rest in outside(piece, part.local)]
        return tuple(pieces)

    def cut(self, max_numel: int) -> list[LocalParam]:
        """Split the tensor into blocks of rows of at most ``max_numel`` elements; a vector, a matrix of a stack, or a
        tensor that fits, is not split. A block is larger where a group of rows is."""
        if self.numel <= max_numel or len(self.shape) < 2 or self.stack is not None:
            return [self]
        rows = max(1, max_numel * self.shape[0] // self.numel // self.row_group) * self.row_group
        starts = range(0, self.shape[0], rows)
        return [self._block(index, start, min(start + rows, self.shape[0])) for index, start in enumerate(starts)]

    def _block(self, index: int, start: int, stop: int) -> LocalParam:
        parts = tuple([piece for part in self.parts if (piece := part.rows(start, stop))])
        shape = stop - start, *self.shape[1:]
        return replace(self, name=f"{self.name}.{index}", shape=shape, parts=parts, block=index)
