"""Serve engines by Ray actors, which the run does not depend on: the KV pool of each machine, and text for drafts.

    rank on machine B ─ take(NAME) ─► KVServer, an actor on machine A ─ the file's bytes, a Ray object ─► rank
                                                                           freed when the rank drops it
    first card of a schedule ─ bytes: what it has generated, cursors ─► TextServer ─ bytes: what others have ─►

Of KV only names and numbers pass the controller. The rank that asks owns the object, so it is freed with its last
reference there, and with that rank. An actor that ends is not started again: KV of its machine is computed again from
then on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fusion.colocate import WorkerSpec
from fusion.rollout.drafts.exchange import answer
from fusion.rollout.drafts.text_store import TextStore
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
    """Run the servers while the block runs, and yield them by Ray's id of the node; None: there is one machine only,
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


class TextServer:
    """`TextStore`, through which engines exchange text, as an actor; the arguments are the store's."""

    def __init__(self, max_bytes: int, max_groups: int, max_age: int | None) -> None:
        self._store = TextStore(max_bytes, max_groups, max_age)

    def answer(self, message: bytes) -> bytes:
        """Answer a message of a `TextExchange`; raise ValueError if it is malformed."""
        return answer(self._store, message)


@contextmanager
def text_server(spec: WorkerSpec) -> Iterator[Any]:
    """Run the server in the block, and yield its handle; None: there are no drafts, or no one to exchange with."""
    drafts = spec.rollout.drafts
    if not drafts.is_on or not drafts.exchange or len(spec.drafting_ranks) < 2:
        yield None
        return
    max_groups = 1 + drafts.history if drafts.from_history else 1
    remote: Any = ray.remote
    server = remote(num_cpus=0)(TextServer).remote(drafts.mib << 20, max_groups, drafts.max_age)
    try:
        yield server
    finally:
        ray.kill(server)


def caller(server: Any) -> Callable[[bytes], bytes] | None:
    """Return a function that sends a message to the server and returns its reply; None: there is no server."""
    return None if server is None else lambda message: ray.get(server.answer.remote(message))
