"""Define the key of the config group `fusion` that states where the optimizer is kept."""

from dataclasses import dataclass

from fusion.telemetry.keys import key
from fusion.telemetry.validation import Group


@dataclass
class OffloadConfig(Group, path="fusion"):
    """Configure where optimizer state and masters are kept."""

    offload: str = key("switch", one_of=("none", "switch", "stream"), read_by="plan simulate")
    """Where optimizer state and fp32 masters are kept: `none`: in HBM; `switch`: in pinned host memory while the card
    generates, which frees HBM for the KV cache; `stream`: in pinned host memory, streamed through HBM in parts during a
    step."""
