"""Define the config group `fusion`: how trainer and engine share cards."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.telemetry.validation import Checks

DEPLOYMENTS = ("separate", "colocated", "full", "hybrid")
RESIDENT = ("auto", "one", "all")
OFFLOADS = ("none", "switch", "stream")


@dataclass
class FusionConfig:
    """Configures which cards have which roles, and how a card switches between training and generation."""

    deployment: str = "colocated"
    """Which roles share cards. `colocated`: the actor trains and generates on every card; `separate`: training and
    generation have their own cards; `hybrid`: colocated cards, and more that only generate; `full`: reference and
    reward model share every card with the actor."""

    infer_cards: int | None = None
    """Number of cards that only generate, in `separate` and `hybrid`; null: half of the actor's cards."""

    score_cards: int = 0
    """Number of cards that hold only reference and reward model; 0: both stay in host memory of the cards that
    train."""

    resident: str = "auto"
    """In `full`, whose weights are in HBM while reference and reward model compute: `one` model at a time, `all` of
    them, or `auto`: all, if they take at most half of what the allocator reports as free."""

    bucket_bytes: int = 256 << 20
    """Bytes of one bucket, the unit in which weights move: a switch holds a few buckets beyond the weights. Weights are
    stored in eighths of it; a larger matrix is cut, and each cut costs one more matrix product."""

    offload: str = "switch"
    """Where optimizer state and fp32 masters are kept: `none`: in HBM; `switch`: in pinned host memory while the card
    generates, which frees HBM for the KV cache; `stream`: in pinned host memory, streamed through HBM in parts during a
    step."""

    double_buffer: bool = False
    """Where cards only generate and `stalesync.max_staleness` lets them continue while new weights arrive: stage these
    in HBM, beside the old ones and at the cost of KV cache, instead of in pinned host memory; shortens the pause."""

    checksum: bool = False
    """Compare a checksum of every moved slice between its ends, and of all weights between trainer and engine."""

    def validate(self) -> None:
        """Check every value of the group.

        Raises:
            ValueError: a value (named by its key) is not accepted.
        """
        check = Checks("fusion", self)
        check.one_of("deployment", DEPLOYMENTS)
        check.integer("infer_cards", at_least=1, null=True)
        check.integer("score_cards", at_least=0)
        check.one_of("resident", RESIDENT)
        check.integer("bucket_bytes", at_least=1024)
        check.one_of("offload", OFFLOADS)
        check.boolean("double_buffer", "checksum")
