"""Decide whether the death of a card can be mended, and what survives of its engine's requests. Pure.

    a card that only generates dies   ┬─ its engine generates, answers or waits ──► replace the engine (all its cards)
                                      ├─ weights are sent, in `separate` ─────────► the same; they are sent again
                                      └─ … in `hybrid`, drafts are written, … ────► the run ends, and says why
    a card that trains or scores dies ────────────────────────────────────────────► the run ends

A card that only generates holds no state of the run: its weights come from the trainers with the next switch, and its
requests are known here, with the queue's rows of their tokens up to the last chunk. While weights are sent, other cards
wait for it in a collective, and fail with it. Cards that only train keep their weights then, and those that only
generate need none of theirs, so they can be sent again. A card that does both has given up its training layout.

    request of the dead engine   its sample is in the queue ──► finished: it arrives
                                 a newer row of its tokens  ──► waits, with these tokens; is away, if they end a turn
                                 else                       ──► waits, with the tokens that it was dispatched with

Invariants (property-tested): an engine is replaced only if all its cards only generate, and no other card has failed
but those that have lost it while weights were sent; at most ``max_restarts`` engines are replaced; every request of a
dead engine is finished or returned, once, with the longest row of it that the queue holds; no other row of it is left.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusion.colocate.deployment import Deployment
from fusion.npu.failures import CONSEQUENCES, FailureKind, RankFailure
from fusion.rollout.entry import Entry
from fusion.rollout.types import SuspendedSample, row_of

IDLE = "idle"
"""Stage of a card that runs none"""
MENDED_IN = frozenset({"generate", "answer", "snapshot_drafts", "close_kv_pool", IDLE})
"""Stages of an engine's cards in which no card of another engine waits for them"""
TRANSFERS = frozenset({"switch", "receive"})
"""Stages in which weights are sent to engines"""


class EngineDeaths:
    """Counts the engines that are replaced. ``engines``: ranks of every engine; ``only_generate``: the cards that
    neither train nor score; ``max_restarts``: maximum number of engines replaced; ``sends_again``: whether weights can
    be sent again where that has failed: no card trains and generates."""

    def __init__(
        self,
        engines: Sequence[tuple[int, ...]],
        only_generate: Collection[int],
        max_restarts: int,
        sends_again: bool = False,
    ):
        self._mended_in = MENDED_IN | TRANSFERS if sends_again else MENDED_IN
        replaced = [engine for engine, ranks in enumerate(engines) if max_restarts and {*ranks} <= {*only_generate}]
        self._engine_of = {rank: engine for engine in replaced for rank in engines[engine]}
        self._max_restarts, self.num_restarts = max_restarts, 0

    @classmethod
    def of(cls, deployment: Deployment, engines: Sequence[tuple[int, ...]], max_restarts: int) -> "EngineDeaths":
        only_generate = [rank for rank in deployment.generate if len(deployment.roles_of(rank)) == 1]
        return cls(engines, only_generate, max_restarts, sends_again=not deployment.shared)

    def engine_of(self, rank: int) -> int | None:
        """Return the engine of a card if it may be replaced."""
        return self._engine_of.get(rank)

    @property
    def watched(self) -> list[int]:
        """The cards whose end is worth noticing while they do nothing; none if no engine may be replaced."""
        return list(self._engine_of)

    def observe_failures(self, failures: Sequence[RankFailure], stages: Mapping[int, Collection[str]]) -> list[int]:
        """Return the engines to replace, which are counted; none: the run ends. ``failures``: of all cards that have
        failed; one at least has died; ``stages``: the stages under way, by rank."""
        engines = self._dead_engines(failures)
        causes = [
            one for one in failures if not (one.kind in CONSEQUENCES and one.stage in self._mended_in & TRANSFERS)
        ]
        if self.why_not(failures, stages) or {self.engine_of(cause.rank) for cause in causes} != engines:
            return []
        self.num_restarts += len(engines)
        return sorted(engines)

    def why_not(self, failures: Sequence[RankFailure], stages: Mapping[int, Collection[str]]) -> str:
        """Return why engines that have died are not replaced; "": they are, or what has died is no engine."""
        engines = self._dead_engines(failures)
        if not engines:
            return ""
        if self.num_restarts + len(engines) > self._max_restarts:
            return f"run.max_engine_restarts={self._max_restarts} engines have been replaced before"
        ranks = [rank for rank, engine in self._engine_of.items() if engine in engines]
        if others := {stage for rank in ranks for stage in stages.get(rank, ())} - self._mended_in:
            return f"an engine is not replaced while its cards run stage {min(others)!r}"
        return ""

    def _dead_engines(self, failures: Sequence[RankFailure]) -> set[int]:
        """Return the engines of which a card has died; none if another card has died, too."""
        dead = {self.engine_of(failure.rank) for failure in failures if failure.kind is FailureKind.DIED}
        return set() if None in dead else {engine for engine in dead if engine is not None}


@dataclass(frozen=True)
class Recovered:
    """``suspended``: requests that continue elsewhere; ``num_finished``: those whose samples arrive; ``dropped``: rows
    of the queue that nothing refers to any more."""

    suspended: list[SuspendedSample]
    num_finished: int
    dropped: list[str]


def recover(
    entries: Iterable[Entry],
    *,
    finished: Collection[str],
    rows: Mapping[str, Sequence[int]],
    version: int,
    turns: Collection[str] = (),
) -> Recovered:
    """Return what survives of the requests of an engine that has died. ``entries``: that the engine had; ``finished``:
    ids of the samples in the queue; ``rows``: by request the numbers of tokens of its rows in the queue (`row_of`);
    ``version``: policy version of the engine; ``turns``: rows of conversations whose turn has ended."""
    suspended, dropped, num_finished = list[SuspendedSample](), list[str](), 0
    for entry in entries:
        name = entry.name
        tokens = sorted(rows.get(name, ()))
        if name in finished:
            num_finished += 1
        else:
            # Also if the queue has lost the row: its next engine reports that.
            kept, row, span = entry.generated, entry.earlier, None
            if tokens and (newest := row_of(name, count := tokens.pop())) != row:
                kept, row, span = count, newest, (entry.oldest if entry.oldest >= 0 else version, version)
            suspended.append(SuspendedSample(name, kept, row, span, turn=span is not None and row in turns))
        dropped += [row_of(name, count) for count in tokens]
    return Recovered(suspended, num_finished, dropped)
