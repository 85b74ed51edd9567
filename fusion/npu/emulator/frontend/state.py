"""Shared state of the modules of `torch.npu`: the loaded extension, and the card that an argument refers to."""

from __future__ import annotations

from typing import Any

import torch

extension: Any = None


def card_index(which: Any = None) -> int:
    """Return the card that an index, name, device or None (the current card) refers to.

    Raises:
        ValueError: another kind of device.
    """
    if which is None:
        return extension.current_card()
    if isinstance(which, int):
        return extension.current_card() if which < 0 else which
    device = torch.device(which)
    if device.type != "npu":
        raise ValueError(f"Expected an npu device, but got: {which}")
    return extension.current_card() if device.index is None else device.index
