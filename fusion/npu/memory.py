"""Define what the memory of a card is used for, and its statistics."""

from dataclasses import dataclass

OWNERS = ("weights", "gradients", "optimizer", "kv", "activations", "buckets")
"""Uses of device memory. Unclaimed memory is `activations`."""


@dataclass(frozen=True)
class Memory:
    """Hold the memory statistics of one card, in bytes.

    `requested` (by tensors), `allocated` (the same, rounded to blocks) and `reserved` (segments of the card, cached
    blocks included) are this process's. `fragmented`: reserved and unused, but in pieces that cannot be released.
    `free`: what this process can still allocate, accounting for other processes on the card and its own cached blocks.
    """

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    capacity: int
    free: int
    requested: int
    fragmented: int


def check_owner(name: str) -> None:
    """Raise ValueError unless ``name`` is one of OWNERS."""
    if name not in OWNERS:
        raise ValueError(f"memory owner {name!r}: expected one of {', '.join(OWNERS)}")
