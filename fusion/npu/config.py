"""The config group `device`."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("auto", "npu", "cuda", "emulated")
DEFAULT_CAPACITY_BYTES = 2 << 30


@dataclass
class DeviceConfig:
    """Which cards a run uses."""

    kind: str = "auto"
    """`npu` (Ascend, through torch_npu), `cuda`, `emulated` (an NPU on the CPU), or `auto`: the first that is there."""
    capacity_bytes: int | None = None
    """HBM of one card in bytes. Emulated: its size (None: 2 GiB). Real: a limit for each process (None: the card)."""

    def validate(self) -> None:
        """Raises ValueError naming the key that is wrong."""
        check_kind(self.kind)
        check_capacity(self.capacity_bytes)


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"device.kind={kind}: expected one of {', '.join(KINDS)}")


def check_capacity(capacity_bytes: int | None) -> None:
    if capacity_bytes is not None and capacity_bytes <= 0:
        raise ValueError(f"device.capacity_bytes={capacity_bytes}: expected a positive number of bytes, or null")
