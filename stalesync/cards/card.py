"""Run one card as a Ray actor.

Stages run one after the other. Methods in concurrency groups run at the same time: control calls, the call that waits
for requests at the end of their chunk, the transfer of new weights to a card that continues generating, and the writing
of a checkpoint. One call is never answered: by it the end of the process is noticed."""

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray

from distqueue import DistQueue
from distqueue.checkpoint import release_freed
from fusion.colocate import Worker, WorkerSpec
from fusion.colocate.failures import ships_failures
from fusion.npu import Device
from stalesync.cards.servers import RayPeer, caller, remote_pools
from stalesync.process.card_environment import bind_to_cores
from stalesync.process.garbage import keep_few_collectives
from stalesync.process.process_log import write_log_to

STAGES = """
prepare rejoin recover switch receive generate answer reference score train snapshot save restore snapshot_drafts
save_drafts restore_drafts begin_profile end_profile""".split()
"""Methods whose failures end the run; they are sent as typed errors"""

CONCURRENT = {
    "control": "status submit abort forget pause complete ask_profile",
    "chunks": "await_ended_chunks",
    "weights": "receive",
    "save": "save save_drafts",
    "watch": "watch",
}
"""Concurrency group of the actor → methods that run in it; all others run one after the other"""


def _in_groups(card: "type[Card]") -> "type[Card]":
    """Have methods run in their concurrency groups; to a type checker they stay as they are."""
    group_method: Any = ray.method
    for group, names in CONCURRENT.items():
        for name in names.split():
            setattr(card, name, group_method(concurrency_group=group)(_passed_on(name, getattr(card, name))))
    return card


def _passed_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `Card` itself, by whose name Ray finds the group; `wraps` would show it the worker's."""

    def passed_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    passed_on.__name__, passed_on.__qualname__ = name, f"Card.{name}"
    return passed_on


@_in_groups
@ships_failures(*STAGES)
class Card(Worker):
    """`Worker` as an actor. `take_rank` must be called first, after Ray has placed the actor."""

    def __init__(self, spec: WorkerSpec, queue: DistQueue, text_server: Any = None):
        self._spec_and_queue, self._text_server = (spec, queue), text_server

    def place(self) -> tuple[str, list[str]]:
        """Return Ray's id of the node, and the accelerators that Ray has assigned to this actor."""
        context = ray.get_runtime_context()
        return context.get_node_id(), [card for cards in context.get_accelerator_ids().values() for card in cards]

    def take_rank(self, rank: int, log: str | None = None, kv_peers: Sequence[RayPeer] = ()) -> None:
        """Become the worker of this rank, which writes what it logs and prints to the file ``log`` (None: Ray's).
        ``kv_peers``: the KV pool of the machine of each rank; (): KV does not travel between machines."""
        if log is not None:
            write_log_to(log)
        keep_few_collectives()
        spec, queue = self._spec_and_queue
        for card in self.place()[1][:1]:
            bind_to_cores(spec.device.kind, card)
        pools = remote_pools(spec, rank, kv_peers)
        super().__init__(spec, rank, queue, exchange_texts=caller(self._text_server), kv_peers=pools)

    def watch(self) -> None:
        """Never returns: Ray reports the end of this process to who waits for it, whatever the card does."""
        threading.Event().wait()

    def prepare(self, address: str, device: Device | None = None, restart: int = 0) -> str:
        description = super().prepare(address, device, restart)
        # What exists now lives as long as the card. To look for garbage in it takes 0.15 s, during which the cards that
        # compute with this one wait for it.
        gc.collect()
        gc.freeze()
        return description

    def save(self, checkpoint: str, export: str) -> None:
        super().save(checkpoint, export)
        release_freed()
