"""Rank the waiting requests: which one is dispatched next. Pure; `waiting_requests.py` keeps them in order.

    order              the next request is …                                       it knows
    fifo               the oldest                                                  nothing
    least_generated    the one with the fewest tokens so far                       nothing
    context            a probe; else one of the group with the longest estimate    finished siblings
    history            the one with the most tokens left, by estimate              last epoch, finished siblings
    oracle             the one with the most tokens left                           the length of every response
    histopipe          shortest or longest first, in turn (`histopipe.py`)         last epoch

With chunks (`rollout.chunk_tokens`) a request comes back to the buffer after each of them, so an order decides again
and again; without, only where a response begins. `context` is Seer's (arXiv 2511.14617): the first request of each
group is a probe, probes go first, shortest first; a group's estimate is the longest finished sibling, before that the
upper bound; now and then the group that has waited longest is served. `history` pools the lengths that the same row had
in the last epoch (RhymeRL, arXiv 2508.18588: ranks of lengths move by 2 to 4 %) with those of finished siblings, and
takes the most remaining tokens first, which is optimal for known lengths where work can be divided (McNaughton, 1959).
Where several steps are in progress, the oldest is first: the trainer waits for it. A group of which nothing is known
has a probe, unless all requests are taken at once. A response that has outgrown its estimate is taken for a long one,
the longer the more.

Estimates are worth nothing where responses run away: what was expected to be short is begun last, and a runaway among
it ends long after everything else. `least_generated` gives every response its share of time, so that a runaway has had
as much as any other when it is discovered. So `history` changes to it while more than `HEDGE` of the responses run away
(`LengthHistory.runaway_share`), and back when they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusion.rollout.stamped_heap import Rank

if TYPE_CHECKING:
    from fusion.rollout.buffer import Entry

OVERDUE = 0.5
"""Estimated remaining tokens of a response that has outgrown its estimate, relative to those that it has"""

HEDGE = 0.003, 0.0015
"""Share of responses that run away at or above which `history` trusts no estimate; below which it does again"""


@dataclass(slots=True)
class Lengths:
    """What is known about the lengths of a group's responses, in tokens.

    Args:
        max_tokens: of a response.
        earlier: of the same row in an earlier epoch.
        exact: of each member; empty where they are not known.
        step: in which the group is expected to be trained.
    """

    max_tokens: int
    earlier: Sequence[int] = ()
    exact: Sequence[int] = ()
    step: int = 0
    num_known: int = field(init=False)
    """Number of lengths that `mean` is of"""
    _sum: int = field(init=False)
    _longest: int = 0
    """Of the finished siblings"""

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

    def observe(self, tokens: int) -> None:
        """Records the length of a finished response."""
        self.num_known += 1
        self._sum += tokens
        if tokens > self._longest:
            self._longest = tokens


RankOf = Callable[["Entry", Lengths], Rank]


def _fifo(request: Entry, lengths: Lengths) -> Rank:
    return ()


def _least_generated(request: Entry, lengths: Lengths) -> Rank:
    return (request.generated,)


def _context(request: Entry, lengths: Lengths) -> Rank:
    return (0, request.generated) if request.member == 0 else (1, -lengths.longest)


def history(request: Entry, lengths: Lengths) -> Rank:
    if request.member == 0 and not lengths.num_known:
        return (lengths.step, 0, request.generated)
    return (lengths.step, 1, *most_left(request, lengths))


def hedged(request: Entry, lengths: Lengths) -> Rank:
    return (lengths.step, request.generated)


def most_left(request: Entry, lengths: Lengths) -> Rank:
    return (-remaining(lengths.mean, request.generated),)


def _oracle(request: Entry, lengths: Lengths) -> Rank:
    return (request.generated - lengths.exact[request.member],)


def remaining(estimate: float, generated: int) -> float:
    """Estimates the tokens that a response still needs, from the estimate of its length and those that it has."""
    return max(estimate - generated, OVERDUE * generated)


ORDERS: dict[str, RankOf] = {
    "fifo": _fifo,
    "least_generated": _least_generated,
    "context": _context,
    "history": history,
    "oracle": _oracle,
}
"""Name of an order → the rank of a request: the lowest is taken first."""

KNOWS_SIBLINGS = frozenset({"context", "history"})
"""Orders whose ranks change when a sibling finishes"""

KNOWS_LAST_EPOCH = frozenset({"history", "histopipe"})
"""Orders that estimate by the lengths of a row's last epoch"""
