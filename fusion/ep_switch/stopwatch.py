"""Measures parts of a switch where the work is: on the card's stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusion.npu import Device


class Stopwatch:
    """Measures the parts of a switch on the current stream by events of the card: no part waits to be measured."""

    def __init__(self, device: Device):
        self._device = device
        self._events: list[Any] = []
        self._parts: list[str] = []

    def start(self) -> None:
        self._parts.clear()
        self._record()

    def mark(self, part: str) -> None:
        """Counts what has been queued since the last mark as ``part``."""
        self._parts.append(part)
        self._record()

    def seconds(self, parts: Sequence[str]) -> dict[str, float]:
        """Sums by part; to be called when the card is done."""
        total = dict.fromkeys(parts, 0.0)
        for i, part in enumerate(self._parts):
            total[part] += self._events[i].elapsed_time(self._events[i + 1]) * 1e-3
        return total

    def _record(self) -> None:
        if len(self._parts) == len(self._events):
            self._events.append(self._device.event(timing=True))
        self._events[len(self._parts)].record()
