"""Find the cause of what cards report as failed, and end the engines that are replaced.

a stage, a control call or a process of a card has failed ─► gather what other cards report
    every card that has died is of an engine that is replaced ─► its stages are abandoned, the run continues
    else ─► `CardFailed` names the root cause

A card of an engine that may be replaced has a call that never returns: it fails when the process ends, so that its end
is noticed also while the engine does nothing."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ray

from fusion.npu.failures import FailureKind
from stalesync.cards.actors import CardActors
from stalesync.cards.stage_calls import RunningStage, describe_hanging, gather_causes, gather_failures
from stalesync.policy.engine_deaths import IDLE, TRANSFERS, EngineDeaths
from stalesync.process.failures import (
    CardFailed,
    FailedStage,
    RunFailed,
    check_end,
    is_consequence,
    late_rank,
    root_cause,
)
from stalesync.process.hosts import alive_hosts, describe_ranks

MAX_END_S = 5.0
"""How long the ends of an engine's processes are awaited; longer only if a host cannot be reached"""
POLL_S = 0.01
STATUS_TIMEOUT_S = 5.0
"""When a stage times out, a card that reports its status within this time is assumed to wait for another card."""


class CardFailures:
    """Decide what the failures of a run's cards end, notice the ends of engines that may be replaced, and remember
    which are not started again yet. ``engines``: ranks of every engine; ``deaths``: decides which are replaced;
    ``running``: the stages in progress; those that are abandoned are removed from it; ``health_checks``: a failing one
    is the cause of all that has ended."""

    def __init__(
        self,
        engines: Sequence[tuple[int, ...]],
        deaths: EngineDeaths,
        *,
        actors: CardActors,
        running: list[RunningStage[Any]],
        health_checks: Sequence[Callable[[], None]],
    ):
        self._engines, self._deaths, self._actors, self._running = engines, deaths, actors, running
        self._health_checks = health_checks
        self._ended: deque[tuple[int, Any, Exception]] = deque()
        """Rank, actor and Ray's error of watched processes that have ended"""
        self._dead: dict[int, str] = {}
        """Engine that has died → how, until `take_dead`"""
        self._down: set[int] = set()
        """Engines that have died and are not started again"""
        self._gone: set[int] = set()
        """Ranks whose processes have ended, of those that `take_ended` has taken out"""

    def watch(self, ranks: Sequence[int] | None = None) -> None:
        """Have the ends of these cards' processes noticed, whatever they do; None: of all that may be replaced."""
        for rank in self._deaths.watched if ranks is None else ranks:
            actor = self._actors[rank]
            actor.watch.remote().future().add_done_callback(partial(self._note_end, rank, actor))

    def _note_end(self, rank: int, actor: Any, future: Any) -> None:
        self._ended.append((rank, actor, future.exception()))

    def take_ended(self) -> Iterator[tuple[int, Exception]]:
        """Yield rank and Ray's error of ended processes of engines not known to be dead."""
        while self._ended:
            rank, actor, error = self._ended.popleft()
            if actor is self._actors[rank]:
                self._gone.add(rank)
                if not self.is_down(rank):
                    yield rank, error

    def is_down(self, rank: int) -> bool:
        """Whether the engine of a card has died, and is not started again yet."""
        return self._deaths.engine_of(rank) in self._down

    def take_dead(self) -> dict[int, str]:
        """Return the engines that have died since the last call, each with a text that says how. Wait for the end of
        their processes, at most `MAX_END_S`: nothing of theirs arrives later."""
        dead, self._dead = self._dead, {}
        left = {rank for engine in dead for rank in self._engines[engine]}
        deadline_s = time.monotonic() + MAX_END_S
        while left := left - self._gone - {rank for rank, actor, _ in [*self._ended] if actor is self._actors[rank]}:
            if time.monotonic() > deadline_s:
                break
            time.sleep(POLL_S)
        return dead

    def observe_restarted(self, engine: int) -> None:
        """Record that other processes run for an engine."""
        self._down.discard(engine)
        self._gone -= {*self._engines[engine]}

    def observe(self, running: RunningStage[Any], first: FailedStage) -> None:
        """Raise the root cause among the failures of the stages in progress, unless they are those of engines that are
        replaced; ``first`` was reported first, in the stage ``running``."""
        failed, why = self._mend(running, first)
        if not failed:
            return
        if running in self._running:
            self._running.remove(running)
        cause = root_cause(failed)
        stage = cause.failure.stage
        if is_consequence(cause) and (hanging := self.find_unresponsive()):
            message = f"stage {stage!r}{describe_hanging(hanging, self._actors.hosts)}. {self._error(cause)}"
            raise CardFailed(message, failure=late_rank(hanging[0], stage, message), trace=cause.trace)
        raise self._error(cause, why) from None

    def observe_end(self, rank: int, error: Exception) -> None:
        """Raise the root cause of the end of a card's process, unless its engine is replaced."""
        self.observe(_idle(rank), FailedStage.of(error, rank=rank, stage=IDLE))

    def is_replaced(self, failed: FailedStage) -> bool:
        """Whether the engine of a card that did not answer a control call has died and is replaced."""
        if failed.failure.kind is not FailureKind.DIED:
            return False
        return self.is_down(failed.failure.rank) or not self._mend(_idle(failed.failure.rank), failed)[0]

    def of_call(self, call: FailedStage) -> RunFailed:
        """Return the failure of a control call, or that of the stage in progress which is its cause."""
        return self._error(root_cause(gather_causes(call, list(self._running))))

    def hang(self, stage: str, late: Sequence[int], timeout_s: float) -> CardFailed:
        """Return the failure of a stage whose ranks ``late`` were not done in time."""
        hanging = self.find_unresponsive()
        message = (
            f"stage {stage!r}: ranks {list(late)} were not done after {timeout_s:.0f} s (cluster.stage_timeout_s)"
            f"{describe_hanging(hanging, self._actors.hosts)}"
        )
        return CardFailed(message, failure=late_rank((hanging or late)[0], stage, message))

    def silence(self, call: str, late: Sequence[int], timeout_s: float) -> CardFailed:
        """Return the failure of a control call that the ranks ``late`` did not answer in time."""
        names, hang = describe_ranks(late, self._actors.hosts), "it hangs" if len(late) == 1 else "they hang"
        message = f"{names} did not answer {call!r} in {timeout_s:.0f} s: {hang}"
        return CardFailed(message, failure=late_rank(late[0], call, message))

    def find_unresponsive(self) -> list[int]:
        """Return the ranks that do not answer a control call within `STATUS_TIMEOUT_S`."""
        rank_by_ref = {self._actors[rank].status.remote(): rank for rank in range(len(self._actors.num_starts))}
        _, unanswered = ray.wait(list(rank_by_ref), num_returns=len(rank_by_ref), timeout=STATUS_TIMEOUT_S)
        return sorted(rank_by_ref[ref] for ref in unanswered)

    def _mend(self, running: RunningStage[Any], first: FailedStage) -> tuple[list[FailedStage], str]:
        """End the engines that have died, if they are replaced; ``first`` was reported first, in the stage
        ``running``. Return the failures that end the run, none if it goes on, and why it does not."""
        others = [stage for stage in list(self._running) if stage is not running]
        if running.stage in ("generate", "answer", "snapshot_drafts") and self.is_down(first.failure.rank):
            self._abandon(running)  # it was begun before the engine was known to be dead
            return [], ""
        failed = gather_failures(first, (running, *others))
        stages: dict[int, set[str]] = {}
        for stage in (running, *others):
            for rank in {*stage.ranks} - {*stage.results}:
                stages.setdefault(rank, set()).add(stage.stage)
        engines = self._deaths.observe_failures([failure.failure for failure in failed], stages)
        for engine in engines:
            of_engine = [failure for failure in failed if failure.failure.rank in self._engines[engine]]
            self._dead[engine] = str(self._describe(root_cause(of_engine)))
            self._down.add(engine)
        for engine in engines:
            ranks = self._engines[engine]
            self._actors.end(ranks)
            transfers = [stage for stage in (running, *others) if stage.stage in TRANSFERS]
            others_wait = any({*ranks} & {*stage.ranks} - {*stage.results} for stage in transfers)
            for stage in (running, *others):
                if {*stage.ranks} <= {*ranks}:
                    self._abandon(stage)
                elif others_wait and stage in transfers:
                    self._break_off(stage, ranks)
        return ([], "") if engines else (failed, self._deaths.why_not([failure.failure for failure in failed], stages))

    def _break_off(self, transfer: RunningStage[Any], lost: Sequence[int]) -> None:
        """Expect of a transfer only its end on cards not in ``lost``, and nothing of what follows there."""
        transfer.died = True
        transfer.pending = {ref: rank for ref, rank in transfer.pending.items() if rank not in lost}
        for stage in list(self._running):
            behind = stage.stage in ("generate", "answer") and stage.begun_s >= transfer.begun_s
            if behind and {*stage.ranks} <= {*transfer.ranks} and transfer.stage == "switch":
                self._abandon(stage)

    def _abandon(self, stage: RunningStage[Any]) -> None:
        """Expect no result of a stage any more."""
        stage.died = True
        stage.pending.clear()
        if stage in self._running:
            self._running.remove(stage)

    def _error(self, cause: FailedStage, why: str = "") -> RunFailed:
        """Return the error with which a failure ends the run; raise that of a health check, of which the end of a
        worker or of the queue is a consequence. ``why``: it does not go on without the card."""
        if cause.failure.kind in (FailureKind.DIED, FailureKind.QUEUE_CLOSED):
            check_end(self._health_checks)
        return self._describe(cause, why)

    def _describe(self, cause: FailedStage, why: str = "") -> RunFailed:
        hosts = self._actors.hosts
        if len({*hosts}) < 2:
            return cause.error(why=why)
        return cause.error(hosts, lost_hosts={*hosts} - {*alive_hosts(ray.nodes()).values()}, why=why)


def _idle(rank: int) -> RunningStage[Any]:
    """In place of the stage of a card of which only the end is known."""
    return RunningStage(IDLE, (rank,), {})
