"""Counts the requests of running engines, so that an event costs O(1) instead of a scan of the buffer. Pure.

Invariants: `total` is the sum of the counts; an engine is in `low` exactly if it runs and has at most ``low_requests``.
"""

from collections.abc import Iterator


class RunningEngines:
    """Tracks the number of requests of each running engine, their total, and the engines with few requests."""

    def __init__(self, low_requests: int) -> None:
        self._low_requests = low_requests
        self._counts: dict[int, int] = {}
        self.total = 0
        self.low: set[int] = set()

    def update(self, engine: int, count: int) -> None:
        """Record that a running engine has ``count`` requests; it starts if it did not run."""
        self.total += count - self._counts.get(engine, 0)
        self._counts[engine] = count
        (self.low.add if count <= self._low_requests else self.low.discard)(engine)

    def remove(self, engine: int) -> None:
        """Record that an engine has stopped."""
        self.total -= self._counts.pop(engine)
        self.low.discard(engine)

    def __contains__(self, engine: int) -> bool:
        return engine in self._counts

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._counts))

    def __len__(self) -> int:
        return len(self._counts)
