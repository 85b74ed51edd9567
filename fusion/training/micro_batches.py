"""Divide a rank's sequences over micro-batches, in which they share the rows of their common prefixes.

    sequences ─ tokens in common ─► `prefixes.links` ─ `plan_micro_batches` ─► micro-batches, each with its `SharedRows`

All ranks of a replica compute the same plan: stages that hold no prompts, or the routing of other layers, agree on the
smallest common prefix by one small collective, and only where the lengths allow sequences to share."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusion.model import Mesh, PackedAttention
from fusion.model.attention import Attend, SharedPrefixAttention
from fusion.model.prefixes import links, may_share
from fusion.npu import Device
from fusion.training.batch import Sequences, plan_micro_batches


def split_micro_batches(
    sequences: Sequences, token_budget: int, *, share: str, mesh: Mesh
) -> tuple[list[torch.Tensor], list[Sequences]]:
    """Return the rows of ``sequences`` in each micro-batch, and the micro-batches.

    Collective over the stages of a pipeline, if rows may be shared. ``share``: `training.share_prefixes`."""
    lengths, shared = sequences.lengths, [0] * len(sequences.lengths)
    if may_share(lengths, share):
        shared = links(lengths, agreed(common_prefixes(sequences), mesh), share)
    plan = plan_micro_batches(lengths, token_budget, shared)
    places = [sequences.rows_of(indices) for indices in plan]
    batches = [
        sequences.select(indices, rows).sharing(_links_within(indices, shared))
        for indices, rows in zip(plan, places, strict=True)
    ]
    return places, batches


def attention_of(batch: Sequences, device: Device) -> Attend:
    """Return what computes the attention of a micro-batch's rows."""
    if batch.shared is None:
        return PackedAttention(batch.lengths, device.operators)
    return SharedPrefixAttention(batch.shared, device.operators, device.torch_device)


def common_prefixes(sequences: Sequences) -> list[int]:
    """Return how many first tokens each sequence has in common with the one before it, as far as this stage can tell.

    With routing to be replayed tokens are only equal if their experts are. The last token of a sequence then counts for
    none, as its experts are its router's choice."""
    columns = [column for column in (sequences.held_tokens, sequences.routing) if column is not None]
    spare = int(sequences.routing is not None)
    parts = [column.flatten(1 if column.dim() > 1 else 0).split(sequences.lengths) for column in columns]
    common = [0] * len(sequences.lengths)
    for index in range(1, len(common)):
        shared = max(0, min(sequences.lengths[index - 1 : index + 1]) - spare)
        for part in parts:
            differs = part[index - 1][:shared] != part[index][:shared]
            differs = differs.any(1) if differs.dim() > 1 else differs
            shared = int(differs.to(torch.uint8).argmax()) if differs.any() else shared
        common[index] = shared
    return common


def _links_within(indices: Sequence[int], shared: Sequence[int]) -> list[int]:
    """Return the links of a micro-batch's sequences to those before them in it."""
    return [shared[index] if index - 1 == before else 0 for before, index in zip([-2, *indices], indices, strict=False)]


def agreed(common: list[int], mesh: Mesh) -> list[int]:
    """Return the smallest `common_prefixes` of all stages of a pipeline; collective over them."""
    if mesh.pp_group is None:
        return common
    smallest = torch.tensor(common)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=mesh.pp_group)
    return smallest.tolist()
