"""Start the workers of a run as Ray actors, one per card, by rank; start others in place of those that have died."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distqueue import DistQueue
from fusion.colocate import WorkerSpec
from fusion.colocate.groups import cost_of
from fusion.npu.config import claim
from fusion.npu.operators import block_tokens
from stalesync.cards.card import Card
from stalesync.policy.placing import check_cards, order_by_place, spread
from stalesync.process.card_environment import card_environment, describe, exported_here, without
from stalesync.process.hosts import Host, alive_hosts, all_hosts

log = logging.getLogger(__name__)
THREADS = {"control": 2, "chunks": 1, "weights": 1, "save": 1, "watch": 1}
"""Threads of a card beside that of its stages, by the kind of call"""


def on_cards(spec: WorkerSpec, kind: str) -> WorkerSpec:
    """Return the spec for cards of a kind: with KV blocks that their attention reads, on each that shares them."""
    size, limits = block_tokens(kind, spec.device.operators) * spec.infer.dcp, spec.rollout.engine
    if limits.block_size % size:
        whole = -(-limits.block_size // size) * size
        log.warning("rollout.engine.block_size=%d: the card's attention reads blocks of %d", limits.block_size, whole)
        limits = replace(limits, block_size=whole)
    return replace(spec, device=replace(spec.device, kind=kind), rollout=replace(spec.rollout, engine=limits))


class CardActors:
    """Hold the actors by rank, in no order until `order`. ``text_server``: of `servers.py`, or None."""

    def __init__(self, spec: WorkerSpec, queue: DistQueue, text_server: Any):
        kind, resources = claim(spec.device.kind, ray.cluster_resources())
        check_cards(kind, spec.world, ray.cluster_resources())
        self._args = on_cards(spec, kind), queue, text_server
        remote: Any = ray.remote
        self._class = remote(concurrency_groups=THREADS, **resources, **self._environment(kind))(Card)
        self._chooses_nodes = kind == "emulated"
        self.hosts: list[Host] = []
        """Host of every rank, once they are in order"""
        hosts = alive_hosts(ray.nodes())
        nodes: list[str | None] = [None] * spec.world
        if self._chooses_nodes:
            nodes = [*spread(spec.world, sorted(hosts, key=lambda node: hosts[node].address))]
        self._actors = [self._start(node) for node in nodes]
        self.num_starts = [1] * spec.world
        """Number of processes that each rank has had"""

    def __getitem__(self, rank: int) -> Any:
        return self._actors[rank]

    def order(self, places: Sequence[tuple[str, list[str]]]) -> None:
        """Give ranks by place. ``places``: of each actor, as `Card.place`."""
        hosts = all_hosts(ray.nodes())
        order = order_by_place([(hosts[node].address, cards) for node, cards in places])
        self._actors = [self._actors[index] for index in order]
        self.hosts = [hosts[places[index][0]] for index in order]

    def restart(self, ranks: Iterable[int]) -> None:
        """Start other actors for these ranks, on the same hosts if these live."""
        for rank in ranks:
            self.num_starts[rank] += 1
            self._actors[rank] = self._start(self.hosts[rank].node if self._chooses_nodes else None, soft=True)

    def observe_places(self, ranks: Sequence[int], places: Sequence[tuple[str, list[str]]]) -> None:
        """Record on which hosts actors have been restarted."""
        hosts = all_hosts(ray.nodes())
        for rank, (node, _) in zip(ranks, places, strict=True):
            self.hosts[rank] = hosts[node]

    def end(self, ranks: Iterable[int] | None = None) -> None:
        """End the processes of these ranks; None: of all."""
        for actor in self._actors if ranks is None else [self._actors[rank] for rank in ranks]:
            ray.kill(actor)

    def _environment(self, kind: str) -> dict[str, Any]:
        """Return the option that sets the variables of the cards' processes, but for those that a host exports."""
        spec: WorkerSpec = self._args[0]
        variables = card_environment(
            kind, cards=spec.world, communicators=cost_of(spec).communicators, deterministic=spec.device.deterministic
        )
        if not variables:
            return {}
        remote: Any = ray.remote
        ask, hosts = remote(num_cpus=0)(exported_here), alive_hosts(ray.nodes())
        asked = [ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in hosts]
        exported = {**exported_here()}
        for of_host in ray.get([one.remote() for one in asked]):
            exported |= of_host
        log.warning("environment of the cards: %s", describe(variables, exported))
        return {"runtime_env": {"env_vars": without(variables, exported)}}

    def _start(self, node: str | None, soft: bool = False) -> Any:
        """Start an actor. ``node``: on which, None: Ray chooses; ``soft``: elsewhere if there is none."""
        place = {} if node is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=soft)}
        return self._class.options(**place).remote(*self._args)
