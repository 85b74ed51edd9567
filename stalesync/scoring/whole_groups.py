"""Hold finished samples until all of their group have arrived, for rewards that compare a response with others. Pure.

    samples ─ add ─► held by group ─┬─ the last one has arrived, or is lost ─► released, each with the other responses
    lost samples ─ give_up ─────────┘

Invariants (property-tested):
1. The held samples of a group are released together, when each of its samples has arrived or is lost; each once, with
   the responses of all others that have arrived, in order of their ids.
2. A sample that arrives after it was given up is released at once, without other responses.
3. What was saved and restored releases as what was not.

Cost: O(1) a sample, and O(n) of the n samples of a group when it is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stalesync.scoring.samples import LOST, Sample, by_id


@dataclass
class _Group:
    held: list[Sample] = field(default_factory=list)
    responses: dict[str, str | None] = field(default_factory=dict)
    """Sample → its response; None: it is lost"""


class WholeGroups:
    """Holds samples of groups of ``size`` samples."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: dict[str, _Group] = {}
        self._given_up: set[str] = set()

    def add(self, samples: Iterable[Sample]) -> list[Sample]:
        """Add samples that have arrived; return those that need not wait any more, these or earlier ones."""
        released: list[Sample] = []
        for sample in samples:
            if sample.id in self._given_up:
                released.append(sample)
                continue
            group = self._groups.setdefault(sample.prompt.id, _Group())
            group.held.append(sample)
            group.responses[sample.id] = sample.response
            released += self._release(sample.prompt.id)
        return released

    def give_up(self, samples: Iterable[Sample]) -> list[Sample]:
        """Record samples that are lost before they have arrived; return those that need not wait any more."""
        released: list[Sample] = []
        for sample in samples:
            group = self._groups.setdefault(sample.prompt.id, _Group())
            if sample.id not in group.responses:
                self._given_up.add(sample.id)
                group.responses[sample.id] = None
            released += self._release(sample.prompt.id)
        return released

    def held(self) -> Iterator[Sample]:
        """Yield the samples that wait."""
        for group in self._groups.values():
            yield from group.held

    def restore(self, held: Iterable[Sample], scored: Mapping[str, Sequence[Sample]]) -> list[Sample]:
        """Restore samples that waited into this empty object; return those that need not wait any more.

        Args:
            scored: samples by group that count as arrived and do not wait: those that were lost, and those of a run
                whose reward did not ask for the others before.
        """
        for name, members in scored.items():
            if len(members) < self._size:
                texts = {one.id: None if one.outcome.error == LOST else one.response for one in members}
                self._groups[name] = _Group(responses=texts)
        return self.add(held)

    def _release(self, name: str) -> list[Sample]:
        group = self._groups[name]
        if len(group.responses) < self._size:
            return []
        del self._groups[name]
        for sample in group.held:
            others = sorted(id for id in group.responses if id != sample.id)
            sample.others = [text for id in others if (text := group.responses[id]) is not None]
        return sorted(group.held, key=by_id)
