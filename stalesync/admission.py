"""The decisions of the loop: what is admitted, which engine gets what, when engines stop, what is trained.

Pure: no ray, no torch, no clock. Events come in as `observe_…`, commands go out as plain data; whoever obeys them (the
controller in a run, a simulator in virtual time, a property test) obeys each one before it asks for the next.

    commands of `step`                               stage
    ┌─► Suspend(engines)?, Publish(version, beside)  switch     engines that share no card with the trainer may continue
    │   AdmitGroups(count)?, Dispatch(…)             fill       all engines of the share start
    │   ┌─► AwaitSamples()                           generate   until a step's groups are ready
    │   └── AdmitGroups(count)?, Dispatch(…)?                   as engines run low, chunks end, groups are filtered
    │   Suspend(shared engines)?, Dispatch(…)?       stop       their cards train; the others take what they leave
    │   SwitchToTrain()                              switch
    └── Score()                                      score      and again, while filtered groups can be made up for
        Train(groups)                                train
            └── AdmitGroups(count)?, Dispatch(…)?               by `feed`: engines that run on cards that do not train

    events
    observe_admitted       the groups that AdmitGroups asked for
    observe_generated      a sample is generated
    observe_scored         all samples of a group are scored; observe_filtered, observe_failed: it is not trained
    observe_chunks_ended   requests have left a running engine at their chunk's end
    observe_stopped        an engine has stopped, with what it left unfinished
    observe_trained        Train is done: the next version begins

What may be admitted and trained is the ledger's decision (`staleness.py`), which waiting request goes to which engine
the buffer's (`fusion/rollout/buffer.py`); this file decides when either is asked, and for how much. At staleness 0
engines get everything from the start: which request is decoded beside which then does not depend on the clock. Above it
an engine has at most AHEAD[1] times the requests that it decodes at a time, and gets more when it has no more than
AHEAD[0] times: what it does not have may go where there is room, or is not begun yet and so no older than necessary.

Cost, for n requests under way: an observation O(log n); `feed` O(1) where nothing is to be done, else that of
`RequestBuffer.dispatch`. A generator holds the place within a step; state is saved between two steps.

Invariants (property-tested in tests/stalesync/test_admission.py), beside those of ledger and buffer:
1. Requests are dispatched only to engines that run or start with the command, at most `max_requests` to each.
2. At staleness 0 a step admits exactly its batch and what was filtered of it, and suspends nothing that is unfinished.
3. Every admitted group ends trained, filtered or failed, unless the run ends first; with no more steps left than n, no
   more than n steps' groups are untrained when a group is admitted.
4. A step makes up for filtered groups until it has filtered more than `max_filtered_groups`.
5. No deadlock: when `AwaitSamples` is commanded an engine has a request, or a sample is generated and not scored.
6. When `Train` is commanded, no engine that shares cards with the trainer runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fusion.rollout import Entry, RequestBuffer, SuspendedSample
from stalesync.commands import (
    AdmitGroups,
    AwaitSamples,
    Command,
    Dispatch,
    DispatchedRequest,
    Publish,
    Score,
    Suspend,
    SwitchToTrain,
    Train,
)
from stalesync.running_engines import RunningEngines
from stalesync.staleness import StalenessLedger

if TYPE_CHECKING:
    from fusion.colocate import InferenceShare

AHEAD = 1.25, 1.5
"""Requests of an engine, by those it decodes at a time: at or below the first it gets more, up to the second."""

MAX_REFILLS = 10
"""Batches of groups that a step may filter before it trains what it has."""

Stage = Literal["idle", "switch", "fill", "generate", "stop", "score", "train"]


@dataclass(frozen=True)
class AdmissionSpec:
    """What the decisions of a run depend on, beside the ledger.

    ``shared_engines``: engines on cards that train; ``engine_slots``: requests an engine decodes at a time; ``ahead``:
    whether generation runs ahead of training (staleness above 0); ``scores_beside``: whether samples are scored while
    others are generated; ``keeps_kv``: whether engines park the KV of what is suspended; ``max_filtered_groups``: that
    a step makes up for.
    """

    group_size: int
    num_engines: int
    shared_engines: frozenset[int]
    engine_slots: int
    max_response_tokens: int
    max_filtered_groups: int
    ahead: bool = False
    scores_beside: bool = True
    keeps_kv: bool = False

    @property
    def max_requests(self) -> int | None:
        """Requests that an engine may have; None: any number."""
        return round(AHEAD[1] * self.engine_slots) if self.ahead else None

    @property
    def low_requests(self) -> int:
        """Requests at or below which an engine gets more; -1: it has all from the start."""
        return round(AHEAD[0] * self.engine_slots) if self.ahead else -1


class Admission:
    """The decisions of a run, over its staleness ledger and its request buffer."""

    def __init__(self, spec: AdmissionSpec, ledger: StalenessLedger) -> None:
        self.spec, self.ledger, self.buffer = spec, ledger, RequestBuffer()
        self.running = RunningEngines(spec.low_requests)
        self.stage: Stage = "idle"
        """Of the last command"""
        self._share: InferenceShare | None = None
        """The share that was published last"""
        self._steps_left = 0
        self._num_filtered = 0
        """Groups filtered since the last `Train`"""
        self._chunks_ended = False
        """Whether requests have come back since the last `feed`"""
        self._num_asked = 0
        """Groups that were commanded and not observed yet"""

    def step(self, steps_left: int, share: InferenceShare) -> Iterator[Command]:
        """Yields the commands of one step.

        Args:
            steps_left: steps that the run has left, this one included.
            share: the engines that generate in this step, and their settings.
        """
        self._steps_left = steps_left
        yield from self._collect(share)
        # What was scored after the engines had stopped may have left the step short of groups.
        while self._makes_up_for_filtered or self._may_not_train_yet:
            yield from self._collect(share)
        self._num_filtered = 0
        self.stage = "train"
        groups = tuple(self.ledger.enough() or self.ledger.ready())
        self.ledger.begin_training(len(groups))
        yield Train(groups)
        self.stage = "idle"

    def feed(self) -> Iterator[Command]:
        """Yields commands that keep running engines busy: what ended with its chunk is dispatched where there is room,
        engines that run low get more."""
        chunks_ended, self._chunks_ended = self._chunks_ended, False
        if self.running.low:
            yield from self._admit()
        if chunks_ended or self.running.low:
            yield from self._dispatch()

    def stop(self) -> Iterator[Command]:
        """Yields a command that stops all engines, if any run."""
        if self.running:
            yield Suspend(tuple(self.running))

    def observe_admitted(self, prompt_tokens: Mapping[str, int]) -> None:
        """The groups that `AdmitGroups` asked for, with the length of their prompts; they wait from now on."""
        assert len(prompt_tokens) == self._num_asked, f"{len(prompt_tokens)} groups for {self._num_asked} asked for"
        self._num_asked = 0
        self.ledger.admit(prompt_tokens)
        for group, length in prompt_tokens.items():
            ids = [f"{group}/{member}" for member in range(self.spec.group_size)]
            self.buffer.add(group, ids, length, self.spec.max_response_tokens)

    def observe_generated(self, id: str, response_tokens: int) -> None:
        """A sample is generated, on whichever engine had it."""
        entry = self.buffer.entries[id]
        engine, group = entry.engine, entry.group
        self.buffer.finish(id, response_tokens)
        self._count(engine)
        if self.buffer.is_finished(group):
            members = self.buffer.remove(group)
            if not self.spec.scores_beside:
                self.ledger.finish(group, sum(entry.load for entry in members))

    def observe_scored(self, group: str, tokens: int) -> None:
        """All samples of a group are scored, and it may be trained. ``tokens``: of those that could be scored."""
        if self.spec.scores_beside:
            self.ledger.finish(group, tokens)

    def observe_filtered(self, group: str, rule: str) -> None:
        """All samples of a group are scored, and a rule of the algorithm leaves it out."""
        self.ledger.filter(group, rule)
        self._num_filtered += 1

    def observe_failed(self, group: str, why: str) -> None:
        """No sample of a group could be scored."""
        self.ledger.fail(group, why)

    def observe_chunks_ended(self, engine: int, suspended: Sequence[SuspendedSample]) -> None:
        """Requests have left a running engine at their chunk's end."""
        self._take_back(engine, suspended)
        self._chunks_ended |= bool(suspended)
        self._count(engine)

    def observe_stopped(self, engine: int, suspended: Sequence[SuspendedSample]) -> None:
        """An engine has stopped; ``suspended``: what it has not finished and not returned at a chunk's end."""
        self._take_back(engine, suspended)
        self.running.remove(engine)

    def observe_trained(self, groups: Sequence[str]) -> None:
        """The groups of `Train` are trained: the next version begins."""
        self.ledger.train(groups)
        self.ledger.advance()

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON, between two steps. Nothing is on an engine."""
        return {"ledger": self.ledger.state_dict(), "buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state into this new object; other keys are ignored."""
        self.ledger.load_state_dict(state["ledger"])
        self.buffer.load_state_dict(state["buffer"])

    def _collect(self, share: InferenceShare) -> Iterator[Command]:
        """Yields commands until a step's groups are ready, the engines that share cards have stopped, and all that is
        generated is scored."""
        self.stage = "switch"
        beside = self._beside(share)
        self._share = share
        if not beside:
            yield from self.stop()
        yield Publish(self.ledger.version, beside)
        self.stage = "fill"
        yield from self._admit(share.engines)
        yield from self._dispatch(share.engines)
        self.stage = "generate"
        while not self.ledger.is_enough:
            if not self.ledger.in_flight:
                yield from self._admit_shorter()
                if not self.ledger.in_flight:
                    break
            yield AwaitSamples()
            yield from self.feed()
            if self._makes_up_for_filtered and self.ledger.may_admit:
                yield from self._admit()
                yield from self._dispatch()
        self.stage = "stop"
        yield from self._stop_shared()
        self.stage = "switch"
        yield SwitchToTrain()
        self.stage = "score"
        yield Score()

    def _stop_shared(self) -> Iterator[Command]:
        """Stops the engines whose cards train now; the others get what these leave."""
        stopping = tuple(engine for engine in self.running if engine in self.spec.shared_engines)
        if stopping:
            yield Suspend(stopping)
        if self.spec.shared_engines:
            yield from self._dispatch()

    def _admit_shorter(self) -> Iterator[Command]:
        """Admits further groups to a step that lacks tokens, as its groups were shorter than others before them."""
        if self.ledger.tokens_per_step is not None:
            yield from self._admit()
            yield from self._dispatch()

    def _admit(self, engines: Sequence[int] | None = None) -> Iterator[Command]:
        """Admits as many groups as the ledger allows, the run has steps left for, and these engines (None: those that
        run) can begin with."""
        count = self._num_admissible
        if count > 0 and self.spec.max_requests is not None:
            count = min(count, self._groups_to_begin(self.spec.max_requests, engines))
        if count > 0:
            self._num_asked = count
            yield AdmitGroups(count)
            assert not self._num_asked, "AdmitGroups is answered by observe_admitted"

    @property
    def _num_admissible(self) -> int:
        """Groups that the ledger allows and the run has steps left for."""
        left = self._steps_left * self.ledger.expected_groups - self.ledger.num_untrained
        return max(0, min(left, self.ledger.may_admit))

    def _groups_to_begin(self, max_requests: int, engines: Sequence[int] | None) -> int:
        """Groups with which these engines (None: those that run) could begin now."""
        if engines is None:
            num_engines, held = len(self.running), self.running.total
        else:
            num_engines, held = len(engines), sum(self.buffer.num_running_on(engine) for engine in engines)
        room = max_requests * num_engines - held - self.buffer.num("waiting")
        return -(-room // self.spec.group_size)

    def _dispatch(self, engines: Sequence[int] | None = None) -> Iterator[Command]:
        """Dispatches what waits to these engines (None: those that run), and starts those that do not run."""
        engines = tuple(self.running) if engines is None else engines
        starting = frozenset(engine for engine in engines if engine not in self.running)
        if not starting and not (engines and self.buffer.num("waiting")):
            return
        requests_by_engine = {
            engine: tuple(_request(entry) for entry in entries)
            for engine, entries in self.buffer.dispatch(engines, self.spec.max_requests).items()
            if entries or engine in starting
        }
        for engine in requests_by_engine:
            self.running.update(engine, self.buffer.num_running_on(engine))
        left_kv = self.buffer.take_left_kv()
        if requests_by_engine:
            yield Dispatch(requests_by_engine, left_kv if self.spec.keeps_kv else {}, starting)

    def _beside(self, share: InferenceShare) -> tuple[int, ...]:
        """The engines that run, where these and no others of those that share no card with the trainer are to run next,
        with the same settings: they can take new weights while they generate."""
        alone = [engine for engine in range(self.spec.num_engines) if engine not in self.spec.shared_engines]
        if not self.spec.ahead or share != self._share or list(self.running) != alone:
            return ()
        return tuple(alone) if {*alone} <= {*share.engines} else ()

    @property
    def _makes_up_for_filtered(self) -> bool:
        """Whether a step that lacks groups because some were filtered admits others in their place."""
        lacks = 0 < self._num_filtered <= self.spec.max_filtered_groups and not self.ledger.is_enough
        return lacks and bool(self.ledger.in_flight or self._num_admissible)

    @property
    def _may_not_train_yet(self) -> bool:
        """Whether groups in flight must be trained before the next version may be published: others that were finished
        have failed."""
        return bool(self.ledger.in_flight) and self.ledger.num_due > self.ledger.num_ready

    def _take_back(self, engine: int, suspended: Sequence[SuspendedSample]) -> None:
        for one in suspended:
            self.buffer.suspend(
                engine,
                one.id,
                generated=one.generated,
                earlier=one.earlier,
                versions=one.versions,
                kv_rank=one.kv_rank,
            )

    def _count(self, engine: int | None) -> None:
        """Counts the requests of an engine again, if it runs: samples may arrive after their engine has stopped."""
        if engine is not None and engine in self.running:
            self.running.update(engine, self.buffer.num_running_on(engine))


def _request(entry: Entry) -> DispatchedRequest:
    return DispatchedRequest(entry.id, entry.group, entry.earlier, entry.kv[1] if entry.kv else None)
