"""Track the samples that are being scored: which have arrived, which wait for their score, which have one. Pure."""

from collections.abc import Container, Sequence

from stalesync.scoring.samples import Sample, by_id

MIN_GROUPS_KEPT = 512
"""Number of groups whose samples are remembered before those that have ended are looked for"""


class ScoringProgress:
    """Track which samples were generated, wait for their score, and are scored. Pure.

    Invariants (property-tested): every sample is taken once as generated and once as scored, never scored first;
    `num_unscored` counts the samples that are ready to be scored and not taken as scored yet, `num_unacknowledged`
    those that are about to be acknowledged to the queue."""

    def __init__(self) -> None:
        self.num_unscored = 0
        self.num_unacknowledged = 0
        self._generated: list[Sample] = []
        self._scored: list[Sample] = []
        self._waiting: list[Sample] = []

    @property
    def has_news(self) -> bool:
        return bool(self._generated or self._scored)

    def observe_generated(self, samples: Sequence[Sample]) -> None:
        self._generated += samples

    def observe_ready(self, samples: Sequence[Sample], wait: bool) -> None:
        """Record generated samples that can be scored. ``wait``: `take_waiting` returns them for scoring; else the
        caller scores them."""
        self.num_unscored += len(samples)
        if wait:
            self._waiting += samples

    def observe_scored(self, samples: Sequence[Sample]) -> None:
        self._scored += samples

    def observe_to_acknowledge(self, count: int) -> None:
        """Record that the caller is about to acknowledge samples to the queue."""
        self.num_unacknowledged += count

    def observe_acknowledged(self, count: int) -> None:
        self.num_unacknowledged -= count

    def take_generated(self) -> list[Sample]:
        """Return the samples generated since the last call, in order of ids."""
        generated, self._generated = self._generated, []
        return sorted(generated, key=by_id)

    def take_scored(self) -> list[Sample]:
        """Return the samples scored since the last call, in order of ids."""
        scored, self._scored = self._scored, []
        self.num_unscored -= len(scored)
        return sorted(scored, key=by_id)

    def take_waiting(self) -> list[Sample]:
        """Return the samples that wait to be scored, in order of ids."""
        waiting, self._waiting = self._waiting, []
        return sorted(waiting, key=by_id)


class Arrivals:
    """Track which samples have arrived, at least until their group has ended. ``in_progress``: the groups that have
    not.

    Cost: amortized O(1) for each sample. Memory follows the number of samples of groups in progress."""

    def __init__(self, in_progress: Container[str]) -> None:
        self._in_progress = in_progress
        self._samples: dict[str, set[str]] = {}
        """Group → its samples that have arrived"""
        self._max_groups = MIN_GROUPS_KEPT

    def new(self, ids: Sequence[str], groups: Sequence[str]) -> list[int]:
        """Return the positions of those samples of a delivery that arrive for the first time."""
        known = self._samples
        positions = []
        for position, (id, group) in enumerate(zip(ids, groups, strict=True)):
            arrived = known.get(group)
            if arrived is None:
                known[group] = {id}
            elif id in arrived:
                continue
            else:
                arrived.add(id)
            positions.append(position)
        if len(known) > self._max_groups:
            self._samples = {group: arrived for group, arrived in known.items() if group in self._in_progress}
            self._max_groups = max(MIN_GROUPS_KEPT, 2 * len(self._samples))
        return positions
