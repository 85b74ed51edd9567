"""`torch.npu`: random numbers."""

from __future__ import annotations

from typing import Any

import torch

from fusion.npu.emulator.frontend import state
from fusion.npu.emulator.frontend.devices import current_device, device_count
from fusion.npu.emulator.frontend.state import card_index


def _get_generator(device: torch.device) -> torch.Generator:
    return state.extension.default_generator(card_index(device))


def manual_seed(seed: int) -> None:
    state.extension.default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for card in range(device_count()):
        state.extension.default_generator(card).manual_seed(int(seed))


def seed() -> int:
    return state.extension.default_generator(current_device()).seed()


def seed_all() -> None:
    manual_seed_all(seed())


def initial_seed() -> int:
    return state.extension.default_generator(current_device()).initial_seed()


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return state.extension.default_generator(card_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    state.extension.default_generator(card_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(card) for card in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for card, new_state in enumerate(new_states):
        set_rng_state(new_state, card)
