"""`torch.npu`: random numbers."""

from __future__ import annotations

from typing import Any

import torch

from fusion.npu.emulator.frontend import state
from fusion.npu.emulator.frontend.devices import current_device, device_count
from fusion.npu.emulator.frontend.state import card_index


def manual_seed(seed: int) -> None:
    state.extension.default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for card in range(device_count()):
        state.extension.default_generator(card).manual_seed(int(seed))


def initial_seed() -> int:
    return state.extension.default_generator(current_device()).initial_seed()


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return state.extension.default_generator(card_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    state.extension.default_generator(card_index(device)).set_state(new_state)
