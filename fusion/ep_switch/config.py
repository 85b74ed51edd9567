"""The config group `fusion`: how trainer and engine share cards."""

from __future__ import annotations

from dataclasses import dataclass

DEPLOYMENTS = ("separate", "colocated", "full", "hybrid")
RESIDENT = ("auto", "one", "all")
OFFLOADS = ("none", "switch", "stream")


@dataclass
class FusionConfig:
    """How a card changes between training and generation. `validate()` raises `ValueError` naming the key."""

    deployment: str = "colocated"
    """Which roles share cards. `colocated`: the actor trains and generates on every card; `separate`: on cards of its
    own for each; `hybrid`: colocated cards, and more that only generate; `full`: reference and reward model share every
    card too."""

    infer_cards: int | None = None
    """Cards that only generate, in `separate` and `hybrid`; null: half of those the actor has."""

    score_cards: int = 0
    """Cards that hold nothing but reference and reward model; 0: both wait on the hosts of the cards that train."""

    resident: str = "auto"
    """In `full`, whose weights are in HBM while reference and reward model compute: `one` model at a time, `all` all
    the time, or `auto`: all, if that takes at most half of what the allocator says is free."""

    bucket_bytes: int = 256 << 20
    """In what portions weights move: what a switch holds beyond the weights is a few of these. Weights are stored in
    eighths of it; a matrix that is larger is cut, which costs a matrix product more for every cut."""

    offload: str = "switch"
    """Optimizer state and fp32 masters: `none` stay in HBM; `switch` are in pinned host memory while the card
    generates, so that HBM goes to the KV cache; `stream` live there, and a step streams them through HBM in parts."""

    double_buffer: bool = False
    """Where cards only generate and `stalesync.max_staleness` lets them go on while new weights arrive: these wait in
    HBM, beside the old ones and at the cost of KV cache, instead of in pinned host memory; the pause is shorter."""

    checksum: bool = False
    """Compare a checksum of every moved slice between its ends, and of all weights between trainer and engine."""

    def validate(self) -> None:
        if self.deployment not in DEPLOYMENTS:
            raise ValueError(f"fusion.deployment={self.deployment!r}: expected one of {', '.join(DEPLOYMENTS)}")
        size = self.bucket_bytes
        if not (isinstance(size, int) and not isinstance(size, bool) and size >= 1024):
            raise ValueError(f"fusion.bucket_bytes={size!r}: expected a whole number of bytes of at least 1024")
        if not (self.infer_cards is None or _count(self.infer_cards, 1)):
            raise ValueError(f"fusion.infer_cards={self.infer_cards!r}: expected null, or a whole number of at least 1")
        if not _count(self.score_cards, 0):
            raise ValueError(f"fusion.score_cards={self.score_cards!r}: expected a whole number of at least 0")
        if self.resident not in RESIDENT:
            raise ValueError(f"fusion.resident={self.resident!r}: expected one of {', '.join(RESIDENT)}")
        if self.offload not in OFFLOADS:
            raise ValueError(f"fusion.offload={self.offload!r}: expected one of {', '.join(OFFLOADS)}")
        for key in ("double_buffer", "checksum"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"fusion.{key}={getattr(self, key)!r}: expected true or false")


def _count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
