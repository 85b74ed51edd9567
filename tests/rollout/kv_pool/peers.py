"""Machines of a test in one process: folders of their own, and servers that are called directly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.rollout.kv_pool.remote import KVServer, RemotePools


@dataclass
class DirectPeer:
    """A machine whose server is called in this process. ``fails``: raised by the next calls; ``spoils``: whether a byte
    of what it sends is wrong; ``asked``: the names that it was asked for."""

    machine: str
    server: KVServer
    fails: Exception | None = None
    spoils: bool = False
    asked: list[str] = field(default_factory=list)

    @property
    def boot(self) -> str:
        return self.server.boot()

    def take(self, name: str, timeout_s: float) -> memoryview | None:
        self.asked.append(name)
        if self.fails is not None:
            raise self.fails
        content = self.server.take(name)
        if content is not None and self.spoils:
            content[len(content) // 2] ^= 4
        return None if content is None else memoryview(content)


def direct_peers(roots: Sequence[Path], spec: KVPoolSpec) -> list[DirectPeer]:
    """One for each folder."""
    return [DirectPeer(f"machine-{number}", KVServer(spec, root)) for number, root in enumerate(roots)]


def pools_of(peers: Sequence[DirectPeer], here: int, run: str = "run", prefill_s_per_token: float | None = 1.0):
    """What machine ``here`` sees of the others; engine n is on machine n."""
    others: Mapping[int, list[DirectPeer]] = {
        engine: [] if engine == here else [peer] for engine, peer in enumerate(peers)
    }
    pools = RemotePools(run, others)
    if prefill_s_per_token is not None:
        pools.observe_prefill(1, prefill_s_per_token)
    return pools
