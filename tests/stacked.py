"""Operators of a card that multiplies stacks of experts, composed."""

from __future__ import annotations

from fusion.npu.operators import Plain


class Stacked(Plain):
    name = "stacked"
    stacks_experts = True
