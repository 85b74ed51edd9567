"""Bring the values that lie on the cards apart from the units (`Buckets.card`) from one end of a switch to the other.

They are a few vectors, which every rank of a layout holds whole (the correction biases of all routers, in float32): a
card that trains and generates has one copy for both ends, and one that only generates receives them in a broadcast.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fusion.ep_switch.plan import Plan
from fusion.model.weights import Buckets
from fusion.npu import Device


def are_sent(plan: Plan) -> bool:
    """Return whether a rank of the target has none of its own, so that all ranks of the group broadcast them."""
    return plan.source.card_numel > 0 and not {*plan.target.ranks} <= {*plan.source.ranks}


def copy_card_values(
    plan: Plan, source: Buckets | None, target: Buckets | None, *, device: Device, group: dist.ProcessGroup | None
) -> None:
    """Copy the values of the source to the target. Collective over the group where they are sent (`are_sent`).

    Raises:
        RuntimeError: the group is broken.
    """
    values = source.card if source is not None else None
    if are_sent(plan):
        if values is None:
            values = torch.empty(plan.source.card_numel, dtype=torch.float32, device=device.torch_device)
        dist.broadcast(values, src=plan.source.ranks[0], group=group)
    if target is not None and values is not None and target.card is not values:
        target.card.copy_(values)
