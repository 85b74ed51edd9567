"""Define the config group `fusion`: how trainer and engine share cards. Keys that a package below reads are its own."""

from dataclasses import dataclass

from fusion.ep_switch.config import SwitchConfig
from fusion.offload.config import OffloadConfig
from fusion.telemetry.keys import POSITIVE, key
from fusion.telemetry.validation import Group

DEPLOYMENTS = ("separate", "colocated", "full", "hybrid")
OWN_CARDS = ("separate", "hybrid")
"""Deployments in which some cards only generate"""


@dataclass
class DeploymentConfig(Group, path="fusion"):
    """Configure which cards have which roles."""

    deployment: str = key("colocated", one_of=DEPLOYMENTS, read_by="simulate")
    """Which roles share cards. `colocated`: the actor trains and generates on every card; `separate`: training and
    generation have their own cards; `hybrid`: colocated cards, and more that only generate; `full`: reference and
    reward model share every card with the actor."""
    infer_cards: int | None = key(
        None, at_least=1, only={"fusion.deployment": OWN_CARDS}, why="where no card only generates", read_by="simulate"
    )
    """Number of cards that only generate, in `separate` and `hybrid`; null: half of the actor's cards."""
    score_cards: int = key(
        0,
        at_least=0,
        only={"fusion.deployment": ("separate", "colocated", "hybrid")},
        why="where every card scores",
        read_by="simulate",
    )
    """Number of cards that hold only reference and reward model; 0: both stay in host memory of the cards that
    train."""
    resident: str = key("auto", one_of=("auto", "one", "all"), only={"fusion.deployment": ("full",)}, refused=False)
    """In `full`, whose weights are in HBM while reference and reward model compute: `one` model at a time, `all` of
    them, or `auto`: all, if they take at most half of what the allocator reports as free."""


@dataclass
class FusionConfig(OffloadConfig, SwitchConfig, DeploymentConfig):
    """Configure which cards have which roles, and how a card switches between training and generation."""

    double_buffer: bool = key(
        False,
        only={"fusion.deployment": OWN_CARDS, "stalesync.max_staleness": POSITIVE},
        why="as no engine continues while weights arrive",
        read_by="simulate",
    )
    """Where cards only generate and `stalesync.max_staleness` lets them continue while new weights arrive: stage these
    in HBM, beside the old ones and at the cost of KV cache, instead of in pinned host memory; shortens the pause."""
