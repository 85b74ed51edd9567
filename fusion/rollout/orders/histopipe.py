"""Order requests such that two steps complement each other, and bind them to classes of engines. Pure.

    step      within the step      engines, of the shortest class on
    odd       short ─► long        first ─► last
    even      long ─► short        last ─► first

HistoPipe (RhymeRL, arXiv 2508.18588): the groups of a step are ranked by the lengths that their rows had in the last
epoch, and divided into classes that the engines share out (`length_classes.py`). An engine that has the short responses
of one step has the long ones of the next, and begins them without waiting: this needs a staleness bound of at least
1. It prefers requests of its class, the oldest step's first; what its class's engines cannot take goes to any engine
with capacity, so nothing waits while there is capacity (`dispatch.py:fill`). A group whose row is not known counts as
the median, and belongs to no class: any engine takes it.

Tail migration: a request belongs to no class either once 90 % of its class is finished and it has outgrown
`HistoPipeSpec.growth` times its expected length. At the end of its chunk it goes to the engine with the most room, if
that is another one, or stays where its KV is; either way the step that trains it is decided by the ledger's gates.

The step of a group is that in which it is expected to be trained when it is admitted (`StalenessLedger.next_steps`). A
step's groups are ranked when the first request is taken; groups that are added to it later join the class of their
length. A restored step is ranked again, of the groups that are left; directions are those of its number.

Cost, for n waiting requests, C classes and s steps in progress: `add` O(1), `take` and `take_for` O(s C + log n), and
once a step the cost of `plan_classes`.

Invariants (property-tested in tests/rollout/orders/test_histopipe.py): `take` returns the waiting request of the lowest
rank, (step, ± expected length), the oldest of equals; `take_for` returns the one of the lowest rank of those without a
class and those that have the engine's class in their step, and None only if there is none."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from fusion.rollout.entry import Entry
from fusion.rollout.orders.interface import Lengths, Order, OrderInputs
from fusion.rollout.orders.length_classes import ClassPlan, ExpectedLength, HistoPipeSpec, plan_classes
from fusion.rollout.orders.stamped_heap import StampedHeap

TAIL = 0.1
"""Share of the requests of a class that are its tail"""
NO_CLASS = -1


def ascends(step: int) -> bool:
    """Whether a step runs from short to long responses."""
    return step % 2 == 1


class HistoPipeOrder(Order):
    """The waiting requests of all groups, by step and class."""

    knows_last_epoch: ClassVar[bool] = True
    prefers_engines: ClassVar[bool] = True

    def __init__(self, inputs: OrderInputs) -> None:
        super().__init__(inputs)
        assert inputs.histopipe is not None, "the order histopipe has settings"
        self._spec = inputs.histopipe
        self._steps: dict[int, _Step] = {}
        self._step_of: dict[str, _Step] = {}
        self._new: dict[str, Entry] = {}
        """Requests that have been added since the last `take`, by id"""
        self._num_ranked = 0
        """Number of the others"""

    def __len__(self) -> int:
        return len(self._new) + self._num_ranked

    def add_group(self, group: str, lengths: Lengths) -> None:
        step = self._steps.setdefault(lengths.step, _Step(lengths.step, self._spec))
        step.add_group(group, lengths)
        self._step_of[group] = step

    def add(self, requests: Iterable[Entry]) -> None:
        self._new.update({request.id: request for request in requests})

    def take(self) -> Entry | None:
        return self._take(range(NO_CLASS, self._spec.num_classes))

    def take_for(self, engine: int) -> Entry | None:
        return self._take(None, engine)

    def moves(self, request: Entry) -> bool:
        return self._step_of[request.group].moves(request)

    def put_back(self, request: Entry) -> None:
        self._push(request)

    def take_all(self, *, ranked: bool) -> list[Entry]:
        return list(iter(self.take, None))

    def observe_finished(self, group: str, tokens: int) -> None:
        expected = self._step_of[group].observe_finished(group)
        if expected is not None:
            self._errors.append(abs(expected - tokens) / max(1, tokens))

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        step = self._step_of.pop(group)
        for request in waiting:
            if self._new.pop(request.id, None) is None:
                step.discard(request)
                self._num_ranked -= 1
        step.discard_group(group)
        if not step.groups:
            del self._steps[step.number]

    def _take(self, classes: Sequence[int] | None, engine: int = 0) -> Entry | None:
        """Take out the request of the lowest rank of these classes; None: of those of an engine."""
        self._rank_new()
        for number in sorted(self._steps):
            step = self._steps[number]
            chosen = (NO_CLASS, step.class_of_engine(engine)) if classes is None else classes
            if (request := step.take(chosen)) is not None:
                self._num_ranked -= 1
                return request
        return None

    def _rank_new(self) -> None:
        new, self._new = self._new, {}
        for number in {self._step_of[request.group].number for request in new.values()}:
            self._steps[number].rank_groups()
        for request in new.values():
            self._push(request)

    def _push(self, request: Entry) -> None:
        self._step_of[request.group].push(request)
        self._num_ranked += 1


class _Group:
    """``expected``: None: its row is not known; ``tokens``: by which it is ranked; ``number``: of its class."""

    def __init__(self, lengths: Lengths) -> None:
        earlier = lengths.earlier
        self.expected = ExpectedLength(sum(earlier) / len(earlier), max(earlier)) if earlier else None
        self.tokens: float = lengths.max_tokens
        self.number = NO_CLASS
        self.num_finished = 0


class _Class:
    """The waiting requests of a class, and how many of the requests of its groups have ended."""

    def __init__(self) -> None:
        self.waiting: StampedHeap[Entry] = StampedHeap()
        self.num_requests = self.num_ended = 0

    @property
    def is_tail(self) -> bool:
        """Whether all but its tail has ended."""
        return self.num_requests - self.num_ended <= TAIL * self.num_requests

    @property
    def first(self) -> tuple[tuple[float, ...], int]:
        """Rank and position of the next request."""
        rank, request = self.waiting.first
        return rank, request.position


class _Step:
    """The groups of step ``number``, and their waiting requests by class."""

    def __init__(self, number: int, spec: HistoPipeSpec) -> None:
        self.number, self._spec = number, spec
        self.groups: dict[str, _Group] = {}
        self._unranked: dict[str, _Group] = {}
        """Groups that have no class yet"""
        self._plan: ClassPlan | None = None
        self._classes = {number: _Class() for number in range(NO_CLASS, spec.num_classes)}
        self._class_of: dict[str, _Class] = {}
        """Waiting request → where it waits"""

    def add_group(self, group: str, lengths: Lengths) -> None:
        self.groups[group] = self._unranked[group] = _Group(lengths)

    def rank_groups(self) -> None:
        """Assign the groups that have been added to classes."""
        groups, self._unranked = self._unranked.values(), {}
        known = [group.expected for group in groups if group.expected is not None]
        if self._plan is None and known:
            self._plan = plan_classes(known, self._spec)
        for group in groups:
            if group.expected is not None and self._plan is not None:
                group.tokens = group.expected.mean
                group.number = self._plan.class_of(group.tokens)
            elif self._plan is not None:
                group.tokens = self._plan.median
            self._classes[group.number].num_requests += self._spec.group_size
            self._classes[group.number].num_ended += group.num_finished

    def class_of_engine(self, engine: int) -> int:
        plan = self._plan
        return NO_CLASS if plan is None else plan.class_of_engine(engine, ascending=ascends(self.number))

    def push(self, request: Entry) -> None:
        group = self.groups[request.group]
        chosen = self._classes[NO_CLASS if self.moves(request) else group.number]
        chosen.waiting.push((group.tokens if ascends(self.number) else -group.tokens,), request)
        self._class_of[request.id] = chosen

    def take(self, classes: Iterable[int]) -> Entry | None:
        """Take out the request of the lowest rank of these classes; None: there is none."""
        waiting = [one for number in {*classes} if (one := self._classes[number]).waiting]
        if not waiting:
            return None
        request = min(waiting, key=lambda one: one.first).waiting.pop()
        del self._class_of[request.id]
        return request

    def discard(self, request: Entry) -> None:
        self._class_of.pop(request.id).waiting.discard(request)

    def moves(self, request: Entry) -> bool:
        group = self.groups[request.group]
        in_tail = group.number != NO_CLASS and self._classes[group.number].is_tail
        return in_tail and request.generated > self._spec.growth * group.tokens

    def observe_finished(self, group: str) -> float | None:
        """Count a finished response; return the length that it was expected to have, if its row is known."""
        known = self.groups[group]
        known.num_finished += 1
        if group not in self._unranked:
            self._classes[known.number].num_ended += 1
        return None if known.expected is None else known.expected.mean

    def discard_group(self, group: str) -> None:
        known = self.groups.pop(group)
        if self._unranked.pop(group, None) is None:
            self._classes[known.number].num_ended += self._spec.group_size - known.num_finished
