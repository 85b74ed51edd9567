"""Define the keys of the config group `fusion` that a switch reads."""

from dataclasses import dataclass

from fusion.telemetry.keys import key
from fusion.telemetry.validation import Group


@dataclass
class SwitchConfig(Group, path="fusion"):
    """Configure how weights move between two layouts."""

    bucket_bytes: int = key(256 << 20, at_least=1024, at_most=1 << 40, read_by="plan")
    """Bytes of one bucket, the unit in which weights move: a switch holds a few buckets beyond the weights. Weights are
    stored in eighths of it; a larger matrix is cut, and each cut costs one more matrix product."""

    checksum: bool = False
    """Compare a checksum of every moved slice between its ends, and of all weights between trainer and engine."""
