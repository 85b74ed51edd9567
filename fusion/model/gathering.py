"""Gather whole tensors on rank 0 from the parts that the ranks own; each element has one owner.

Ranks send their parts in the order of the global tensors, several small ones in a message: models with experts have
tens of thousands, and every message has its latency."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist

from fusion.model.boxes import Box
from fusion.model.bucket_plan import unit_bytes
from fusion.model.config import ModelConfig
from fusion.model.formats import Format, local_table
from fusion.model.holder import WeightHolder
from fusion.model.local_param import LocalParam, Part
from fusion.model.parallel import Parallel

Message = list[tuple[LocalParam, Part]]
"""Parts of one rank and dtype that it sends together, in the order of the global tensors"""

MESSAGE_BYTES = 1 << 20
"""Size of a message of several parts, at most"""


def owners_of(model: WeightHolder) -> Mapping[str, tuple[tuple[int, LocalParam, Part], ...]]:
    """Map each global tensor to the parts that make it up, each from the lowest rank that holds it."""
    max_bytes, itemsize = unit_bytes(model.bucket_bytes), model.weights.dtype.itemsize
    return _owners_in_layout(model.format, model.config, model.mesh.parallel, max_bytes, itemsize)


@lru_cache(maxsize=1)
def _owners_in_layout(
    format: Format, config: ModelConfig, parallel: Parallel, max_bytes: int, itemsize: int
) -> Mapping[str, tuple[tuple[int, LocalParam, Part], ...]]:
    """Cached, as every save of a run asks for the same."""
    owners: dict[str, dict[Box, tuple[int, LocalParam, Part]]] = {}
    for rank in range(parallel.world):
        for param in local_table(format, config, parallel, rank, max_bytes=max_bytes, itemsize=itemsize):
            for part in param.parts:
                owners.setdefault(part.name, {}).setdefault(part.region, (rank, param, part))
    return {name: tuple(parts.values()) for name, parts in owners.items()}


def gather_tensors(
    model: WeightHolder, views: Mapping[str, torch.Tensor] | None = None, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, whole CPU tensor) of every global tensor on rank 0, (name, None) on other ranks; of a model with
    adapters, of theirs alone. Collective. ``views``: tensors to gather instead of the model's own, for example a copy:
    this rank's parameters by local name. ``group``: process group over the ranks of the mesh, in their order, not in
    use elsewhere during the call. None: the mesh's own."""
    mesh = model.mesh
    views = model.weights.views if views is None else views
    group = group if group is not None else mesh.world_group
    owners = owners_of(model)
    if model.config.adapters is not None:
        owners = {name: holders for name, holders in owners.items() if holders[0][1].trained}
    messages = _messages(owners, model.weights.dtype.itemsize)
    received: dict[int, list[torch.Tensor]] = defaultdict(list)
    num_sent_ahead = 0
    for name, holders in owners.items():
        whole = None
        dtype = torch.float32 if holders[0][1].float32 else model.weights.dtype
        if mesh.rank == 0:
            shape = [max(part.region[d][1] for _, _, part in holders) for d in range(len(holders[0][2].region))]
            whole = torch.empty(shape, dtype=dtype)
        for rank, param, part in holders:
            if whole is not None:
                if rank == 0:
                    piece = part.view(views[param.name]).cpu()
                else:
                    if not received[rank]:
                        received[rank] = _receive(next(messages[rank]), dtype, rank, group)
                    piece = received[rank].pop()
                whole[tuple(slice(*span) for span in part.region)] = piece
            elif rank == mesh.rank:
                if not num_sent_ahead:
                    message = next(messages[rank])
                    _send(message, views, group)
                    num_sent_ahead = len(message)
                num_sent_ahead -= 1
        yield name, whole


def _messages(
    owners: Mapping[str, Iterable[tuple[int, LocalParam, Part]]], itemsize: int
) -> dict[int, Iterator[Message]]:
    """Divide what each rank but the first sends to it into messages of at most MESSAGE_BYTES, or of one part."""
    sent: dict[int, Message] = defaultdict(list)
    for holders in owners.values():
        for rank, param, part in holders:
            sent[rank].append((param, part))
    return {rank: _divided(parts, itemsize) for rank, parts in sent.items() if rank}


def _divided(parts: Message, itemsize: int) -> Iterator[Message]:
    message: Message = []
    num_bytes = 0
    for param, part in parts:
        size = prod(part.shape) * (torch.float32.itemsize if param.float32 else itemsize)
        if message and (num_bytes + size > MESSAGE_BYTES or param.float32 != message[-1][0].float32):
            yield message
            message, num_bytes = [], 0
        message.append((param, part))
        num_bytes += size
    if message:
        yield message


def _send(message: Message, views: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    pieces = [part.view(views[param.name]).cpu().flatten() for param, part in message]
    dist.send(torch.cat(pieces) if len(pieces) > 1 else pieces[0], group_dst=0, group=group)


def _receive(message: Message, dtype: torch.dtype, rank: int, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the parts of a rank's next message, the last one first."""
    sizes = [prod(part.shape) for _, part in message]
    data = torch.empty(sum(sizes), dtype=dtype)
    dist.recv(data, group_src=rank, group=group)
    return [piece.view(part.shape) for piece, (_, part) in zip(data.split(sizes), message, strict=True)][::-1]
