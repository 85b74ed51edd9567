"""What the parts of `torch.npu` share: the extension, and which card an argument means."""

from __future__ import annotations

from typing import Any

import torch

extension: Any = None
fractions: dict[int, float] = {}  # of a card's capacity that this process limited itself to


def card_index(which: Any = None) -> int:
    """The card that an index, name, device or None (the current card) means; ValueError for another kind of device."""
    if which is None:
        return extension.current_card()
    if isinstance(which, int):
        return extension.current_card() if which < 0 else which
    found = torch.device(which)
    if found.type != "npu":
        raise ValueError(f"Expected an npu device, but got: {which}")
    return extension.current_card() if found.index is None else found.index
