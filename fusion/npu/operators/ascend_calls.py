"""Hold calls of `torch.ops.npu` to documented limits (`limits.py`).

A call beyond a limit runs the plain composition and says so, once; on the emulated card, whose models are tiny, it is
reported and made all the same.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from fusion.npu.operators import limits
from fusion.npu.operators.plain import Plain


class AscendCalls(Plain):
    """What every part of the table of Ascend cards asks before a call."""

    def __init__(self) -> None:
        self._is_emulated = "torch_npu" not in sys.modules
        if self._is_emulated:
            from fusion.npu.emulator.operators import register

            register()
        self._allowed: dict[tuple, bool] = {}
        self._reported: set[str] = set()

    def _takes(self, operator: Any, like: torch.Tensor, args: tuple, about: tuple = (), **kwargs: Any) -> bool:
        """Return whether an operator may be called with these arguments. Limits are checked once for every dtype and
        shape of a row of ``like``, and what else is ``about`` the call."""
        if not like.shape[0]:
            return False  # not every operator takes empty tensors
        key = operator, like.dtype, like.shape[1:], about
        allowed = self._allowed.get(key)
        if allowed is None:
            name = operator._schema.name.removeprefix("npu::")
            broken = limits.beyond(name, limits.arguments_of(operator, args, kwargs))
            allowed = self._allowed[key] = not broken or self._exceeds(name, broken)
        return allowed

    def _exceeds(self, name: str, broken: list[str]) -> bool:
        """Report a call beyond limits; return whether to make it nevertheless."""
        what = "made nevertheless on the emulated card" if self._is_emulated else "composed of PyTorch's operators"
        message = f"{name}: {'; '.join(broken)}: {what}"
        if message not in self._reported:
            self._reported.add(message)
            warnings.warn(message, stacklevel=4)
        return self._is_emulated
