"""Choose how many samples are scored at a time, so that not their number decides how often the queue is called. Pure.

Samples that are scored together are reported together. A large batch costs few calls of the queue; a small one reports
its first score early. So the batch grows as long as batches take little time.

Invariants (property-tested), where a sample takes t seconds: n <= `MAX_BATCH` samples that have
arrived are scored in at most 8 + n * t / `BATCH_S` batches; a batch takes at most 2 * `BATCH_S` seconds, or has at most
`MIN_BATCH` samples; a batch that was not full does not make the next one larger."""

MIN_BATCH, MAX_BATCH = 64, 8192
BATCH_S = 0.25
"""Seconds that a batch should take"""


class ScoringBatch:
    """``count``: maximum number of samples of the next batch."""

    def __init__(self) -> None:
        self.count = MIN_BATCH

    def observe(self, num_samples: int, seconds: float) -> None:
        """Record how long a batch took: its samples' scores, and their way from the queue and back."""
        if seconds > 2 * BATCH_S:
            self.count = max(MIN_BATCH, self.count // 2)
        elif seconds <= BATCH_S and num_samples == self.count:
            self.count = min(MAX_BATCH, 2 * self.count)
