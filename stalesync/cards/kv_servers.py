"""Serve the KV pool of each machine to the cards of the others, as Ray objects.

    rank on machine B ─ take(NAME) ─► KVServer, an actor on machine A ─ the file's bytes, a Ray object ─► rank
                                                                           freed when the rank drops it

Only names and numbers pass the controller. The rank that asks owns the object, so it is freed with its last reference
there, and with that rank. An actor that ends is not started again: KV of its machine is computed again from then on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fusion.colocate import WorkerSpec
from fusion.rollout.kv_pool.remote import KVServer, Peer, PeerGone, PeerLate, RemotePools
from stalesync.process.hosts import alive_hosts


@dataclass(frozen=True)
class RayPeer:
    """The pool of a machine, behind its actor; implements `Peer`. ``machine``: Ray's id of the node."""

    machine: str
    boot: str
    server: Any

    def take(self, name: str, timeout_s: float) -> memoryview | None:
        ref = self.server.take.remote(name)
        try:
            content = ray.get(ref, timeout=timeout_s)
        except GetTimeoutError:
            raise PeerLate(self.machine) from None
        except RayError as error:  # the actor or its node has ended, the object is lost, or there is no memory for it
            raise PeerGone(f"{self.machine}: {error}") from None
        return None if content is None else memoryview(content)


@contextmanager
def kv_servers(spec: WorkerSpec) -> Iterator[Mapping[str, RayPeer] | None]:
    """Run the servers while the block runs, and yields them by Ray's id of the node; None: there is one machine only,
    or KV does not travel, and nothing is started."""
    nodes = list(alive_hosts(ray.nodes()))
    if spec.kv_pool is None or spec.rollout.kv_pool.remote != "ray" or len(nodes) < 2:
        yield None
        return
    remote: Any = ray.remote
    actor = remote(num_cpus=0)(KVServer)
    servers = {}
    try:
        for node in nodes:
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            servers[node] = actor.options(scheduling_strategy=place).remote(spec.kv_pool)
        boots = ray.get([server.boot.remote() for server in servers.values()])
        yield {node: RayPeer(node, boot, servers[node]) for node, boot in zip(servers, boots, strict=True)}
    finally:
        for server in servers.values():
            ray.kill(server)


def remote_pools(spec: WorkerSpec, rank: int, peers: Sequence[RayPeer]) -> RemotePools | None:
    """Return the pools of the other machines as a rank sees them. ``peers``: the machine of each rank; (): None."""
    if not peers or spec.kv_pool is None:
        return None
    by_engine: dict[int, list[Peer]] = {}
    for engine, ranks in enumerate(spec.engines):
        others = {peers[one].machine: peers[one] for one in ranks if peers[one].machine != peers[rank].machine}
        by_engine[engine] = list(others.values())
    return RemotePools(spec.kv_pool.run, by_engine)
