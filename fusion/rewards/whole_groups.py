"""Hold finished samples until all of their group have arrived, for rewards that compare a response with others. Pure.

    samples ─ add ─► held by group ─┬─ the last one has arrived, or is lost ─► released, each with the other responses
    lost samples ─ give_up ─────────┘

Invariants (property-tested):
1. The held samples of a group are released together, when each of its samples has arrived or is lost; each once, with
   the responses of all others that have arrived, in order of their ids.
2. A sample that arrives after it was given up is released at once, without other responses.
3. What was saved and restored releases as what was not.

Cost: O(1) a sample, and O(n) of the n samples of a group when it is released."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class Sibling(Protocol):
    """A finished sample of a group. ``others``: assigned when it is released."""

    id: str
    response: str
    others: Sequence[str]

    @property
    def group(self) -> str: ...


Sample = TypeVar("Sample", bound=Sibling)


@dataclass
class _Siblings(Generic[Sample]):
    held: list[Sample] = field(default_factory=list)
    responses: dict[str, str | None] = field(default_factory=dict)
    """Sample → its response; None: it is lost"""


class WholeGroups(Generic[Sample]):
    """Hold samples of groups of ``size`` samples."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: dict[str, _Siblings[Sample]] = {}
        self._given_up: set[str] = set()

    def add(self, samples: Iterable[Sample]) -> list[Sample]:
        """Add samples that have arrived; return those that need not wait any more, these or earlier ones."""
        released: list[Sample] = []
        for sample in samples:
            if sample.id in self._given_up:
                released.append(sample)
                continue
            group = self._groups.setdefault(sample.group, _Siblings())
            group.held.append(sample)
            group.responses[sample.id] = sample.response
            released += self._release(sample.group)
        return released

    def give_up(self, samples: Iterable[Sample]) -> list[Sample]:
        """Record samples that are lost before they have arrived; return those that need not wait any more."""
        released: list[Sample] = []
        for sample in samples:
            group = self._groups.setdefault(sample.group, _Siblings())
            if sample.id not in group.responses:
                self._given_up.add(sample.id)
                group.responses[sample.id] = None
            released += self._release(sample.group)
        return released

    def held(self) -> Iterator[Sample]:
        for group in self._groups.values():
            yield from group.held

    def restore(self, held: Iterable[Sample], scored: Mapping[str, Mapping[str, str | None]]) -> list[Sample]:
        """Restore samples that waited into this empty object; return those that need not wait any more.
        ``scored``: group → responses of samples by id that count as arrived and do not wait: those that were lost
        (None), and those of a run whose reward did not ask for the others before."""
        for name, responses in scored.items():
            if len(responses) < self._size:
                self._groups[name] = _Siblings(responses={**responses})
        return self.add(held)

    def _release(self, name: str) -> list[Sample]:
        group = self._groups[name]
        if len(group.responses) < self._size:
            return []
        del self._groups[name]
        for sample in group.held:
            others = sorted(id for id in group.responses if id != sample.id)
            sample.others = [text for id in others if (text := group.responses[id]) is not None]
        return sorted(group.held, key=attrgetter("id"))
