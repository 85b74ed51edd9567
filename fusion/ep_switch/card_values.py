"""Bring the values that lie on the cards apart from the units (`Buckets.card`) from one end of a switch to the other.

They are a few vectors, which every rank of a layout holds whole (the correction biases of all routers, in float32): a
card that trains and generates has one copy for both ends, and one that only generates receives them in a broadcast."""

import torch
import torch.distributed as dist

from fusion.ep_switch.plan import Plan
from fusion.model.weights import Buckets
from fusion.npu import Device


def are_sent(plan: Plan) -> bool:
    """Return whether a rank of the target has none of its own, so that all ranks of the group broadcast them."""
    return plan.source.card_numel > 0 and not {*plan.target.ranks} <= {*plan.source.ranks}


def values_of(plan: Plan, source: Buckets | None, device: Device) -> torch.Tensor | None:
    """Return the source's values, or memory that receives them in the broadcast; None: this rank has no part in it."""
    if source is not None:
        return source.card
    if not are_sent(plan):
        return None
    with device.owner("buckets"):
        return torch.empty(plan.source.card_numel, dtype=torch.float32, device=device.torch_device)


def copy_values(
    plan: Plan, values: torch.Tensor | None, target: Buckets | None, group: dist.ProcessGroup | None
) -> None:
    """Copy ``values`` (`values_of`) to the target. Collective over the group where they are sent (`are_sent`).
    Raise RuntimeError: the group is broken."""
    if are_sent(plan):
        assert values is not None
        dist.broadcast(values, src=plan.source.ranks[0], group=group)
    if target is not None and values is not None and target.card is not values:
        target.card.copy_(values)
