"""Notice that engines have died, also while they do nothing, and remember which are not started again yet.

    running ──► down ──► running        `observe_failures` … `take_dead` … `observe_restarted`

A card of an engine that may be replaced has a call that never returns: it fails when the process ends."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from stalesync.policy.engine_deaths import EngineDeaths
from stalesync.process.failures import FailedStage, root_cause

MAX_END_S = 5.0
"""How long the ends of an engine's processes are awaited; longer only if a host cannot be reached"""
POLL_S = 0.01


class EngineWatch:
    """Watches the engines that may be replaced, and counts them with ``deaths``. ``engines``: ranks of every engine;
    ``describe``: what a user is told of a failure."""

    def __init__(
        self, engines: Sequence[tuple[int, ...]], deaths: EngineDeaths, describe: Callable[[FailedStage], str]
    ):
        self._engines, self._deaths, self._describe = engines, deaths, describe
        self.watched = deaths.watched
        """The cards to watch"""
        self._ended: deque[tuple[int, Any, Exception]] = deque()
        """Rank, actor and Ray's error of watched processes that have ended"""
        self._dead: dict[int, str] = {}
        """Engine that has died → how, until `take_dead`"""
        self._down: set[int] = set()
        """Engines that have died and are not started again"""
        self._gone: set[int] = set()
        """Ranks whose processes have ended, of those that `take_ended` has taken out"""

    def watch(self, rank: int, actor: Any) -> None:
        """Has the end of a card's process noticed, whatever it does."""

        def note(future: Any) -> None:
            self._ended.append((rank, actor, future.exception()))

        actor.watch.remote().future().add_done_callback(note)

    def take_ended(self, actors: Any) -> Iterator[tuple[int, Exception]]:
        """Yield rank and Ray's error of ended processes of engines not known to be dead. ``actors``: now, by rank."""
        while self._ended:
            rank, actor, error = self._ended.popleft()
            if actor is actors[rank]:
                self._gone.add(rank)
                if not self.is_down(rank):
                    yield rank, error

    def is_down(self, rank: int) -> bool:
        """Whether the engine of a card has died, and is not started again yet."""
        return self._deaths.engine_of(rank) in self._down

    def observe_failures(self, failed: Sequence[FailedStage], stages: Mapping[int, Collection[str]]) -> list[int]:
        """Return the engines that have died and are replaced; none: the run ends. ``stages``: under way, by rank."""
        engines = self._deaths.observe_failures([one.failure for one in failed], stages)
        for engine in engines:
            cause = root_cause([one for one in failed if one.failure.rank in self._engines[engine]])
            self._dead[engine] = self._describe(cause)
            self._down.add(engine)
        return engines

    def take_dead(self, actors: Any) -> dict[int, str]:
        """Return the engines that have died since the last call, each with a text that says how. Wait for the end of
        their processes, at most `MAX_END_S`: nothing of theirs arrives later. ``actors``: as of `take_ended`."""
        dead, self._dead = self._dead, {}
        left = {rank for engine in dead for rank in self._engines[engine]}
        deadline_s = time.monotonic() + MAX_END_S
        while left := left - self._gone - {rank for rank, actor, _ in [*self._ended] if actor is actors[rank]}:
            if time.monotonic() > deadline_s:
                break
            time.sleep(POLL_S)
        return dead

    def observe_restarted(self, engine: int) -> None:
        """Record that other processes run for an engine."""
        self._down.discard(engine)
        self._gone -= {*self._engines[engine]}
