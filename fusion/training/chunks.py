"""Describe a part of a checkpoint: a box of a global tensor, and where its elements are on this rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """The box of the global tensor ``name`` of ``shape`` that begins at ``offset`` and has the shape of ``tensor``.

    ``owned``: this rank saves it; every rank loads all of its chunks.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    owned: bool = True

    @property
    def key(self) -> str:
        """Identifies the chunk in its file."""
        return key_of(self.name, self.offset)


def key_of(name: str, offset: Iterable[int]) -> str:
    """Return `Chunk.key`."""
    return f"{name}@{','.join(map(str, offset))}"
