"""Select the exchange of a group of ranks: they connect once and check whether their cards can share memory."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusion.ep_switch.exchange import Exchange, Kind
from fusion.ep_switch.exchange_collective import CollectiveExchange
from fusion.ep_switch.exchange_shared import PeerMessages, SharedExchange
from fusion.ep_switch.outcome import Stopwatch
from fusion.ep_switch.peer_sockets import Invitation, Listener, machine
from fusion.npu import Device
from fusion.npu.all_or_none import gather_json

_messages: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The `PeerMessages` of a process group, None where it has none. It lives as long as the group, or until a failure."""


def open_exchange(device: Device, group: dist.ProcessGroup | None, *, kind: Kind, clock: Stopwatch) -> Exchange:
    """Open the exchange for switches over ``group`` (default: all processes). Collective over it the first time.
    Raise ValueError: ``kind`` is `shared`, but the ranks are not all on one machine or their cards cannot share
    memory."""
    group = group or dist.distributed_c10d._get_default_group()
    rank, peers = dist.get_rank(), dist.get_process_group_ranks(group)
    common: dict[str, Any] = dict(rank=rank, peers=peers, device=device, clock=clock)
    if len(peers) == 1:
        return Exchange(**common)
    if kind == "collective":
        return CollectiveExchange(group=group, **common)
    if group not in _messages:
        _messages[group] = _connect(device, group, rank=rank, peers=peers)
    if (messages := _messages[group]) is not None:
        return SharedExchange(messages=messages, forget=lambda: _messages.pop(group, None), **common)
    if kind == "shared":
        raise ValueError("exchange='shared': the ranks are not all on one machine with cards that share memory")
    return CollectiveExchange(group=group, **common)


def _connect(device: Device, group: dist.ProcessGroup, *, rank: int, peers: Sequence[int]) -> Any:
    """Exchange invitations and memory handles with all ranks; return None unless all of them can share memory."""
    listener, probe, handle = Listener(), None, b""
    if device.can_share:
        probe = torch.zeros(1, device=device.torch_device)
        handle = device.share([probe])
    cards = gather_json([machine(), handle.hex(), listener.invitation], group)
    handles = [bytes.fromhex(handle) for _, handle, _ in cards]
    same_machine = all(card_machine == cards[0][0] for card_machine, _, _ in cards)
    if not all(gather_json(same_machine and all(handles) and _can_map(device, handles), group)):
        listener.close()
        return None
    invitations = {peer: Invitation(*invitation) for peer, (_, _, invitation) in zip(peers, cards, strict=True)}
    return PeerMessages(listener.connect(rank, invitations), peers)


def _can_map(device: Device, handles: Sequence[bytes]) -> bool:
    """Return whether this process may map the others' memory, which a container's rules may forbid."""
    try:
        device.map(b"".join(handles), [None] * len(handles))
    except (RuntimeError, ValueError):
        return False
    return True
