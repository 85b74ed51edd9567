"""Where the optimizer's states live: what it needs of them, and the plain answer, in HBM.

    for index, states in groups:                    one group a gradient bucket, in order; the same loop over any answer
        update(states["master"], states["exp_avg"], states["exp_avg_sq"])

`fusion.offload.StreamedStates` is the other answer: on the host, of which two groups are in HBM while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from fusion.npu import Device

States = dict[str, torch.Tensor]
"""The states of one bucket by name, flat float32 tensors."""


class StateGroups(Protocol):
    """All states start as zeros."""

    def __iter__(self) -> Iterator[tuple[int, States]]:
        """Every group in order, on the card, to be read and written until the next is asked for."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """`name.index` → the live tensor, on the card or on the host. Ask anew before every use."""


MakeStates = Callable[[Device, Sequence[Mapping[str, int]]], StateGroups]
"""(device, by group: name → elements) → the states."""


class ResidentStates:
    """States in HBM, each in storage of its own, which may be released and taken back under the live tensors."""

    def __init__(self, device: Device, groups: Sequence[Mapping[str, int]]):
        with device.owner("optimizer"):
            self._groups: list[States] = [
                {name: torch.zeros(numel, device=device.torch_device) for name, numel in sizes.items()}
                for sizes in groups
            ]

    def __iter__(self) -> Iterator[tuple[int, States]]:
        yield from enumerate(self._groups)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{name}.{index}": state for index, states in enumerate(self._groups) for name, state in states.items()}
