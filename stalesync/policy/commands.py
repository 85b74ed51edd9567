"""Define the commands of `admission.py`: plain data, executed by the controller or by a simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AdmitGroups:
    count: int


@dataclass
class DispatchedRequests:
    """Requests for an engine, as columns with one value of each; not changed after they were created. ``earlier``: the
    queue's rows with their tokens so far, "" for none; ``kv_ranks``: the attention ranks of this engine that have their
    KV, None: no rank; ``priorities``, ``kv_tokens``, ``kv_engines``, ``observations``: as in `Request`."""

    ids: Sequence[str]
    groups: Sequence[str]
    earlier: Sequence[str]
    kv_ranks: Sequence[int | None]
    priorities: Sequence[int]
    kv_tokens: Sequence[int]
    kv_engines: Sequence[int | None]
    observations: Sequence[int]


@dataclass(frozen=True)
class Dispatch:
    """Start the engines ``starting``, submit requests to engines, and free KV of requests that left an engine.
    ``last``: no other `Dispatch` comes before these engines are suspended, so they may stop when they are idle."""

    requests_by_engine: Mapping[int, DispatchedRequests]
    forget_by_engine: Mapping[int, Sequence[str]]
    starting: frozenset[int]
    last: bool = False


@dataclass(frozen=True)
class AwaitSamples:
    """Wait until something can be observed, and observe it."""


@dataclass(frozen=True)
class Suspend:
    """Stop these engines between two of their steps; answered by `observe_stopped` for each. ``to_train``: `Score`
    and `Train` are next, so the cards that train may switch as soon as they have stopped; `SwitchToTrain` follows."""

    engines: tuple[int, ...]
    to_train: bool = False


@dataclass(frozen=True)
class Publish:
    """Send the weights of policy ``version`` to the engines, of which only those ``overlapped`` generate meanwhile."""

    version: int
    overlapped: tuple[int, ...] = ()


@dataclass(frozen=True)
class SwitchToTrain:
    """Return the cards that train to the training phase."""


@dataclass(frozen=True)
class Score:
    """Score the samples that could not be scored while cards generated."""


@dataclass(frozen=True)
class Accumulate:
    """Accumulate the gradient of these groups, oldest first, of which the next `Train` makes one step with its own;
    answered by `observe_accumulated`."""

    groups: tuple[str, ...]


@dataclass(frozen=True)
class Train:
    """Train these groups, oldest first; answered by `observe_trained`."""

    groups: tuple[str, ...]


Command = AdmitGroups | Dispatch | AwaitSamples | Suspend | Publish | SwitchToTrain | Score | Accumulate | Train


def only_starts(command: Command) -> bool:
    """Whether a command may be executed while cards switch for the engines: it starts those at most, to begin then."""
    return isinstance(command, AdmitGroups) or (isinstance(command, Dispatch) and not command.forget_by_engine)
