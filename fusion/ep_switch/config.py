"""The config group `fusion`: how trainer and engine share cards."""

from __future__ import annotations

from dataclasses import dataclass

DEPLOYMENTS = ("colocated",)


@dataclass
class FusionConfig:
    """How a card changes between training and generation. `validate()` raises `ValueError` naming the key."""

    deployment: str = "colocated"
    """Which roles share a card. `colocated`: the trainer and the engine of the actor, on every card."""

    bucket_bytes: int = 64 << 20
    """Unit in which weights are stored, freed and moved: what a switch holds beyond the weights is a few of these."""

    offload: bool = True
    """Optimizer state goes to pinned host memory while the card generates, so that HBM goes to the KV cache."""

    checksum: bool = False
    """Compare a checksum of every moved slice between its ends, and of all weights between trainer and engine."""

    def validate(self) -> None:
        if self.deployment not in DEPLOYMENTS:
            raise ValueError(f"fusion.deployment={self.deployment!r}: expected one of {', '.join(DEPLOYMENTS)}")
        size = self.bucket_bytes
        if not (isinstance(size, int) and not isinstance(size, bool) and size >= 1024):
            raise ValueError(f"fusion.bucket_bytes={size!r}: expected a whole number of bytes of at least 1024")
        for key in ("offload", "checksum"):
            value = getattr(self, key)
            if not isinstance(value, bool):
                raise ValueError(f"fusion.{key}={value!r}: expected true or false")
