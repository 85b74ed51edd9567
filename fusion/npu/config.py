"""The config group `device`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("auto", "npu", "cuda", "emulated")
STREAMS = ("eager", "adversarial")
DEFAULT_CAPACITY_BYTES = 2 << 30


@dataclass
class DeviceConfig:
    """Which cards a run uses."""

    kind: str = "auto"
    """`npu` (Ascend, through torch_npu), `cuda`, `emulated` (an NPU on the CPU), or `auto`: the first that is there."""
    capacity_bytes: int | None = None
    """HBM of one card in bytes. Emulated: its size (None: 2 GiB). Real: a limit for each process (None: the card)."""

    streams: str = "eager"
    """Emulated cards: when asynchronous work is done. `eager`: when it is called. `adversarial`: non-blocking copies
    and collectives as late as synchronisation allows, freed memory poisoned, so that a missing wait shows (slower)."""

    pace: str | None = None
    """Emulated cards: the model whose steps they take the time of, on the cards that `cluster.hardware` names: a preset
    of recipes/shapes or a Hugging Face folder (`fusion/costmodel/pace.py`). null: as fast as the host computes."""

    pace_tokens: int = 1
    """Tokens of the modelled run that one of this run's stands for, in prompts, responses and contexts."""

    pace_speed: float = 1.0
    """Seconds of the modelled run that one of this run's stands for. With as many as `pace_tokens` a decode step takes
    as long as one of the modelled engine."""

    pace_training: float = 1.0
    """How many times a training step counts: for what a step of the modelled run trains or scores beyond this one's."""

    def validate(self) -> None:
        """Raises ValueError naming the key that is wrong."""
        if self.pace is not None and self.kind != "emulated":
            raise ValueError(f"device.pace={self.pace}: expected device.kind=emulated; device.kind={self.kind}")
        if self.pace_tokens < 1:
            raise ValueError(f"device.pace_tokens={self.pace_tokens}: expected a whole number of at least 1")
        for key in ("pace_speed", "pace_training"):
            if not 0 < getattr(self, key) < float("inf"):
                raise ValueError(f"device.{key}={getattr(self, key)}: expected a number > 0")
        check_kind(self.kind)
        check_streams(self.streams)
        check_capacity(self.capacity_bytes)


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"device.kind={kind}: expected one of {', '.join(KINDS)}")


def check_streams(streams: str) -> None:
    if streams not in STREAMS:
        raise ValueError(f"device.streams={streams}: expected one of {', '.join(STREAMS)}")


def check_capacity(capacity_bytes: int | None) -> None:
    if capacity_bytes is not None and capacity_bytes <= 0:
        raise ValueError(f"device.capacity_bytes={capacity_bytes}: expected a positive number of bytes, or null")


def claim(kind: str, cluster: Mapping[str, float]) -> tuple[str, dict[str, Any]]:
    """The kind of card a run gets on a Ray cluster with these resources, and what an actor asks Ray for to get one.

    ``auto`` takes Ascend cards if the cluster counts any, else CUDA cards, else emulated ones.
    """
    if kind == "auto":
        kind = "npu" if cluster.get("NPU") else "cuda" if cluster.get("GPU") else "emulated"
    asks: dict[str, dict[str, Any]] = {
        "npu": {"num_cpus": 1, "resources": {"NPU": 1}},
        "cuda": {"num_cpus": 1, "num_gpus": 1},
        "emulated": {"num_cpus": 0},
    }
    return kind, asks[kind]
