"""Define what the request buffer asks of an order: it keeps the waiting requests, and decides which is next.

    add_group, add ─► waiting ─ take, take_for, take_all ─► dispatched, or put back
                         ▲                                      │
                         └── add ◄── suspended ◄────────────────┴─► observe_finished

Invariants of every order (property-tested in tests/rollout/orders): a request that is added is taken once, unless it is
discarded; a take that is put back changes nothing."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from fusion.rollout.entry import Entry
from fusion.rollout.length_history import LengthHistory
from fusion.rollout.orders.length_classes import HistoPipeSpec


@dataclass(slots=True)
class Lengths:
    """What is known about the lengths of a group's responses, in tokens. ``max_tokens``: of a response; ``earlier``: of
    the same row in an earlier epoch; ``exact``: of each member, if known; ``step``: of its expected training."""

    max_tokens: int
    earlier: Sequence[int] = ()
    exact: Sequence[int] = ()
    step: int = 0
    num_known: int = field(init=False)
    """Number of lengths that `mean` is of"""
    _sum: int = field(init=False)
    _longest: int = 0
    """Length of the longest finished sibling"""

    def __post_init__(self) -> None:
        self.num_known, self._sum = len(self.earlier), sum(self.earlier)

    @property
    def longest(self) -> int:
        """Seer's estimate: the longest finished sibling, at first the upper bound"""
        return self._longest or self.max_tokens

    @property
    def mean(self) -> float:
        """The mean of the last epoch and of finished siblings, at first the upper bound"""
        return self._sum / self.num_known if self.num_known else self.max_tokens

    def forget_earlier(self) -> None:
        """Estimate as if the row had had no earlier epoch."""
        self.earlier, self.num_known, self._sum = (), 0, 0

    def observe(self, tokens: int) -> None:
        self.num_known += 1
        self._sum += tokens
        if tokens > self._longest:
            self._longest = tokens


class OrderInputs(NamedTuple):
    """What an order may read. ``history``: lengths of the data's rows in the last epoch, and the share of responses
    that run away; ``histopipe``: settings of the order `histopipe`, None with another one."""

    history: LengthHistory
    histopipe: HistoPipeSpec | None = None


class Order(ABC):
    knows_last_epoch: ClassVar[bool] = False
    """Whether it reads `history`, which is recorded only then"""
    prefers_engines: ClassVar[bool] = False
    """Whether engines prefer requests: `take_for`, `moves`"""

    def __init__(self, inputs: OrderInputs) -> None:
        self.history = inputs.history
        self._errors: list[float] = []
        """Relative errors of estimates since `take_errors`"""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def add_group(self, group: str, lengths: Lengths) -> None:
        """Announce a group before its first request is added."""

    @abstractmethod
    def add(self, requests: Iterable[Entry]) -> None:
        """Add requests, which wait from now on."""

    @abstractmethod
    def take(self) -> Entry | None:
        """Take out the next request; None: none waits."""

    @abstractmethod
    def put_back(self, request: Entry) -> None:
        """Undo the last `take` or `take_for`, which returned this request."""

    @abstractmethod
    def take_all(self, *, ranked: bool) -> list[Entry]:
        """Take out all requests, in order, as all are bound to engines now; not ``ranked``: the oldest first."""

    @abstractmethod
    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        """Forget a group, and its requests that still wait."""

    @abstractmethod
    def observe_finished(self, group: str, tokens: int) -> None:
        """Record the length of a finished response."""

    def take_errors(self) -> list[float]:
        """Return the relative errors of the estimates of responses that have finished since the last call."""
        errors, self._errors = self._errors, []
        return errors

    def take_for(self, engine: int) -> Entry | None:
        """Take out the next request that this engine prefers; None: it prefers none."""
        return None

    def moves(self, request: Entry) -> bool:
        """Whether a request leaves the engine that has its KV, if another one has more room."""
        return False
