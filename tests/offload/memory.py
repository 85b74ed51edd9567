"""What a pool has left."""

from __future__ import annotations

from fusion.offload import HostPool


def free_bytes(pool: HostPool) -> int:
    """Bytes of the pool's arenas that are in no region."""
    return sum(stop - start for gaps in pool._free for start, stop in gaps)
