"""Count the KV blocks of sequences that grow by one token a step, without visiting them.

A sequence of n tokens has ceil(n / size) blocks. If it had ``length`` tokens after step k0, it has length - k0 + k
after step k, so it takes a block at the steps k with the same remainder modulo the block size: the count of sequences
by remainder suffices.

Invariant (property-tested): `used` is the sum of the blocks of all sequences that were added and not removed.

Cost: `add`, `remove` O(1); `used` O(size), whatever the number of sequences."""


class GrowingBlocks:
    """``size``: tokens of a block."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._by_remainder = [0] * size
        self._whole = 0
        self.num_sequences = 0

    def add(self, length: int, step: int) -> None:
        """Add a sequence that has ``length`` tokens after ``step`` steps."""
        self._count(length, step, 1)

    def remove(self, length: int, step: int) -> None:
        """Remove one: ``length`` and ``step`` as it was added, or any later pair of the same sequence."""
        self._count(length, step, -1)

    def used(self, step: int) -> int:
        """Count the blocks after ``step`` steps."""
        rounds, rest = divmod(step, self.size)
        started = sum(self._by_remainder[self.size - rest :]) if rest else 0
        return self._whole + rounds * self.num_sequences + started

    def _count(self, length: int, step: int, sign: int) -> None:
        whole, remainder = divmod(length - step + self.size - 1, self.size)
        self._whole += sign * whole
        self._by_remainder[remainder] += sign
        self.num_sequences += sign
