"""Measure the parts of a switch on the card's stream."""

from collections.abc import Sequence
from typing import Any

from fusion.npu import Device


class Stopwatch:
    """Measures the parts of a switch by events on the current stream, without waiting for it."""

    def __init__(self, device: Device):
        self._device = device
        self._events: list[Any] = []
        self._parts: list[str] = []

    def start(self) -> None:
        self._parts.clear()
        self._record()

    def mark(self, part: str) -> None:
        """Count the work queued since the last mark as ``part``."""
        self._parts.append(part)
        self._record()

    def seconds(self, parts: Sequence[str]) -> dict[str, float]:
        """Return the seconds by part; call it after synchronising the card."""
        total = dict.fromkeys(parts, 0.0)
        for i, part in enumerate(self._parts):
            total[part] += self._events[i].elapsed_time(self._events[i + 1]) * 1e-3
        return total

    def _record(self) -> None:
        if len(self._parts) == len(self._events):
            self._events.append(self._device.event(timing=True))
        self._events[len(self._parts)].record()
