"""Store the optimizer's states: the interface that the optimizer uses, and the implementation in HBM.

    for index, states in groups:                    one group per gradient bucket, in order
        update(states["master"], states["exp_avg"], states["exp_avg_sq"])

`fusion.offload.StreamedStates` keeps them on the host, with two groups in HBM while a step runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from fusion.npu import Device

States = dict[str, torch.Tensor]
"""The states of one bucket by name, flat float32 tensors."""


class StateGroups(Protocol):
    """All states start as zeros."""

    def __iter__(self) -> Iterator[tuple[int, States]]:
        """Yield every group in order, on the card, to be read and written until the next one is requested."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return `name.index` → live tensor, on the card or on the host. Call again before every use."""


MakeStates = Callable[[Device, Sequence[Mapping[str, int]]], StateGroups]
"""(device, by group: name → elements) → the states."""


class ResidentStates:
    """States in HBM, each with separate storage, which can be released and allocated again under the live tensors."""

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
