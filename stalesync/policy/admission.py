"""Decide what the loop admits, which engine receives which requests, when engines stop, and what is trained.

Pure: no ray, no torch, no clock. Inputs are `observe_…` calls, outputs are commands as plain data. The caller (the
controller in a run, a simulator in virtual time, a property test) executes each command before it asks for the next.

    commands of `step`                               stage
    ┌─► Suspend(engines)?, Publish(version, …)       switch     engines that share no card with the trainer may continue
    │   AdmitGroups(count)?, Dispatch(…)             fill       all engines of the share start
    │   ┌─► AwaitSamples()                           generate   until a step's groups are ready
    │   ├── AdmitGroups(count)?, Dispatch(…)?                   as engines run low, chunks end, groups are filtered
    │   └── [ Suspend(…)?, Dispatch(…)?, SwitchToTrain() ]?     in the tail, where `lending.py` says so: then not below
    │       Accumulate(groups)?                                 once the cards that train have returned
    │   Suspend(shared engines)?, Dispatch(…)?       stop       their cards train; their requests go to the others
    │   SwitchToTrain()                              switch
    └── Score()                                      score      repeated while filtered groups can be replaced
        Train(groups)                                train
            └── AdmitGroups(count)?, Dispatch(…)?               by `feed`: engines that run on cards that do not train

    events
    observe_admitted       the groups of AdmitGroups
    observe_generated      samples are generated
    observe_scored         all samples of a group are scored; observe_filtered, observe_failed: it is not trained
    observe_chunks_ended   requests were suspended at the end of their chunk or turn, or as the engine is replaced
    observe_returned       the environment of a conversation has answered; observe_branched: another branch begins
    observe_cancelled      a group is not generated any further, as an environment has failed
    observe_stopped        an engine has stopped, with its unfinished requests
    observe_accumulated    Accumulate is done: the groups are trained in this version
    observe_trained        Train is done: the next version begins
    observe_seconds        how long a command has taken: this file has no clock

What may be admitted and trained is the ledger's decision (`staleness.py`), which waiting request goes to which engine
the buffer's (`fusion/rollout/buffer.py`), for how many groups or requests `supply.py`'s; this file decides when.
At staleness 0 without chunks and turns engines receive all requests at the start, so that the batches of requests do
not depend on timing. Otherwise requests are bound late: an engine has at most AHEAD[1] times the number of requests
that it decodes at a time, of which the KV fits its cache, and receives more when it has no more than AHEAD[0] times
that number. The remaining requests can go to any engine with capacity, in an order of `fusion/rollout/orders`, and
start no earlier (and so become no older) than necessary.

The requests of an engine that is replaced are dispatched to the others. Where these have got their last requests, and
where none is left, generation stops when they are done, the weights are published again, and the requests are
dispatched to all. Otherwise a replaced engine takes part from the next `Publish` on that stops the engines, as its
weights come with it.

Cost, for n requests in progress: an observation O(log n); `feed` O(1) if there is nothing to do, else that of
`RequestBuffer.dispatch`. A generator holds the position within a step; state is saved between two steps.

Invariants (property-tested in tests/stalesync/policy/test_admission.py), in addition to those of ledger and buffer:
1. Requests are dispatched only to engines that run or start with the command, at most `max_requests` to each.
2. At staleness 0 a step admits exactly its batch and replacements of its filtered groups, and suspends no unfinished
   request of an engine that is not replaced.
3. Every admitted group ends trained, filtered or failed, unless the run ends first; with n steps left, at most n steps'
   groups are untrained when a group is admitted.
4. A step replaces filtered groups until it has filtered more than `max_filtered_groups`.
5. No deadlock: when `AwaitSamples` is issued, an engine has a request, a conversation is away, or a sample is
   generated and not scored. Engines stay while conversations are away: where none runs and one returns, the weights are
   published again.
6. When `Train` or `Accumulate` is issued, no engine that shares cards with the trainer runs.
7. No `Dispatch` follows one that is the last before its engines are suspended.
8. An engine that is replaced gets no request before the next `Publish` that stops the engines."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from fusion.colocate import InferenceShare
from fusion.rollout import RequestBuffer, SuspendedSample
from fusion.rollout.length_history import MAX_ROWS
from stalesync.policy.admission_spec import AdmissionSpec
from stalesync.policy.commands import Accumulate, AwaitSamples, Command, Publish, Score, Suspend, SwitchToTrain, Train
from stalesync.policy.lending import Lending
from stalesync.policy.staleness import StalenessLedger
from stalesync.policy.supply import RunningEngines, Supply

Stage = Literal["idle", "switch", "fill", "generate", "stop", "score", "train"]
STEP_TAIL = 0.1
"""Maximum fraction of a step's samples still being generated in the tail of its generation (`timing_s/gen_tail`)"""


class Admission:
    def __init__(self, spec: AdmissionSpec, ledger: StalenessLedger) -> None:
        self.spec, self.ledger = spec, ledger
        self.buffer = RequestBuffer(
            spec.num_probes,
            spec.order,
            exact_lengths=spec.exact_lengths,
            pool=spec.kv_pool,
            max_rows=min(spec.num_rows, MAX_ROWS),
            histopipe=spec.histopipe,
        )
        self.running = RunningEngines(spec.low_requests)
        self._supply = Supply(spec, ledger, buffer=self.buffer, running=self.running)
        self._lending = Lending(
            generates=bool(spec.shared_engines),
            engine_slots=spec.engine_slots,
            step_samples=ledger.groups_per_step * spec.group_size,
        )
        """Decides when cards that train leave generation early, where they may (`AdmissionSpec.lends`)"""
        self.stage: Stage = "idle"
        """Stage of the last command"""
        self._share: InferenceShare | None = None
        """The last published share"""
        self._num_filtered = 0
        """Number of groups filtered since the last `Train`"""
        self._chunks_ended = False
        """Whether requests were suspended at the end of their chunk since the last `feed`"""
        self._returned = False
        """Whether the cards that train have returned before the step has its groups"""
        self._lent_s = 0.0
        """Seconds for which cards that generate were lent since `take_lent_s`"""

    def step(self, steps_left: int, share: InferenceShare) -> Iterator[Command]:
        """Yield the commands of one step. ``steps_left``: remaining steps of the run, including this one; ``share``:
        the engines that generate in this step, and their settings."""
        self._supply.steps_left = steps_left
        yield from self._collect(share)
        # Samples scored after the engines had stopped may have been filtered, so that the step lacks groups.
        while self._can_replace_filtered or self._cannot_train_yet:
            yield from self._collect(share)
        self._num_filtered = 0
        self.stage = "train"
        groups = tuple(self.ledger.enough() or self.ledger.ready())
        self.ledger.begin_training(len(groups))
        yield Train(groups)
        self.stage = "idle"

    def feed(self) -> Iterator[Command]:
        """Yield commands that keep running engines busy: dispatches requests whose chunk has ended, and give more to
        engines with few requests."""
        chunks_ended, self._chunks_ended = self._chunks_ended, False
        if self.running.low and self.spec.ahead:
            yield from self._supply.admit()
        if self.running.low or chunks_ended and not self._supply.dispatches_once:
            yield from self._supply.dispatch()

    def stop(self) -> Iterator[Command]:
        """Yield a command that stops all running engines, if there are any."""
        if self.running:
            yield Suspend(tuple(self.running))

    def observe_admitted(self, prompt_tokens: Mapping[str, int]) -> None:
        """Record the groups of `AdmitGroups` with the length of their prompts; their requests wait from now on."""
        self._supply.observe_admitted(prompt_tokens)

    def observe_generated(self, response_tokens: Mapping[str, int], *, lost: bool = False) -> None:
        """Record that samples are generated, by id with the tokens of their responses. ``lost``: they are not, but
        they will not be; the tokens are those that are known."""
        engines, groups = self.buffer.finish(response_tokens, lost=lost)
        for engine in engines:
            self._supply.count(engine)
        for group in groups:
            if self._supply.end_cancelled(group):
                continue
            members = self.buffer.remove(group)
            if not self.spec.scores_overlapped:
                self.ledger.finish(group, sum([entry.load for entry in members]))

    def observe_returned(self, id: str, observation_tokens: int) -> None:
        """Record that the environment of a conversation that was away has answered; its request waits again."""
        self.buffer.observe_returned(id, observation_tokens)
        self._chunks_ended = True

    def observe_branched(self, id: str, prompt_tokens: int, max_tokens: int) -> None:
        """Record that a conversation that was away goes on in another branch; its request waits again."""
        self.buffer.branch(id, prompt_tokens, max_tokens)
        self._chunks_ended = True

    def observe_cancelled(self, group: str, why: str) -> None:
        """Record that an environment of a group has failed. The group fails once no engine has a request of it."""
        self._supply.cancel(group, why)

    def observe_scored(self, group: str, tokens: int) -> None:
        """Record that a group is scored and may be trained. ``tokens``: of its samples whose reward did not fail."""
        if self.spec.scores_overlapped:
            self.ledger.finish(group, tokens)

    def observe_filtered(self, group: str, rule: str) -> None:
        """Record that all samples of a group are scored, and that a rule of the algorithm filters it."""
        self.ledger.filter(group, rule)
        self._num_filtered += 1

    def observe_failed(self, group: str, why: str) -> None:
        """Record that no sample of a group could be scored."""
        self.ledger.fail(group, why)

    def observe_kv_tokens(self, kv_tokens: int) -> None:
        """Record the capacity of an engine's KV cache in tokens: of all its attention ranks, the smallest engine's."""
        self._supply.kv_tokens = kv_tokens

    def observe_chunks_ended(self, engine: int, suspended: Sequence[SuspendedSample]) -> None:
        """Record requests that an engine suspended at the end of their chunk, or as it is replaced."""
        self._supply.take_back(engine, suspended)
        self._chunks_ended |= bool(suspended)
        self._supply.count(engine)

    def observe_stopped(self, engine: int, suspended: Sequence[SuspendedSample]) -> None:
        """Record that an engine has stopped; ``suspended``: its unfinished requests."""
        self._supply.take_back(engine, suspended)
        self.running.remove(engine)

    def observe_seconds(self, command: Command, seconds: float) -> None:
        """Record how long a command has taken, with everything that was executed meanwhile."""
        if isinstance(command, SwitchToTrain):
            self._lending.observe_return(seconds)
        elif isinstance(command, AwaitSamples | Accumulate):
            self._lending.observe_seconds(seconds)

    def take_lent_s(self) -> float:
        """Return the seconds that cards of both roles trained while generation went on, since the last call."""
        lent_s, self._lent_s = self._lent_s, 0.0
        return lent_s

    def observe_accumulated(self, groups: Sequence[str], lost: Sequence[str] = ()) -> None:
        """Record that the gradient of the groups of `Accumulate` is part of this version's, except that of those in
        ``lost``, of which no sample was left."""
        for group in lost:
            self.ledger.fail(group, "lost")
        untrained = set(lost)
        self.ledger.train([group for group in groups if group not in untrained])

    def observe_trained(self, groups: Sequence[str], lost: Sequence[str] = ()) -> None:
        """Record that the groups of `Train` are trained, but ``lost``: without a sample; begin the next version."""
        self.observe_accumulated(groups, lost)
        self.ledger.advance()
        self.buffer.history.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON, between two steps. No engine has a request."""
        state = {"ledger": self.ledger.state_dict(), "buffer": self.buffer.state_dict()}
        return state | {"lengths": self.buffer.history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state into this new object; other keys are ignored."""
        self.ledger.load_state_dict(state["ledger"])
        self.buffer.history.load_state_dict(state.get("lengths", {}))
        self.buffer.load_state_dict(state["buffer"])

    def _collect(self, share: InferenceShare) -> Iterator[Command]:
        """Yield commands until a step's groups are ready, engines on shared cards have stopped, and all is scored."""
        self.stage = "switch"
        overlapped = self._overlapped(share)
        self._share = share
        if not overlapped:
            yield from self.stop()
        self._lending.begin_generation()
        yield from self._publish(overlapped)
        self.stage = "fill"
        yield from self._supply.admit(share.engines)
        yield from self._supply.dispatch(share.engines, last=self._supply.dispatches_once)
        self.stage = "generate"
        while not self.ledger.is_enough:
            if not self.ledger.in_flight:
                yield from self._admit_shorter()
                if not self.ledger.in_flight:
                    break
            yield AwaitSamples()
            if self.spec.lends and not self.ledger.is_enough:
                yield from self._lend(self._lending)
            if self._must_publish_again:
                yield from self._publish_again(share)
            yield from self.feed()
            if self._can_replace_filtered and self.ledger.may_admit:
                yield from self._supply.admit()
                yield from self._supply.dispatch()
        self._lent_s += self._lending.end_generation()
        if not self._returned:
            yield from self._return()
        self.stage = "score"
        yield Score()

    def _lend(self, lending: Lending) -> Iterator[Command]:
        """Return cards to training before the step has its groups, where that pays, and accumulate gradients."""
        num_requests, step = self.running.total + self.buffer.num_idle, self.ledger.expected_groups
        if not lending.observe_requests(num_requests):
            return
        num_ready = min(self.ledger.num_ready, self._num_to_accumulate)
        if not self._returned:
            num_others = sum(engine not in self.spec.shared_engines for engine in self.running)
            if not lending.returns(num_ready, step, num_requests=num_requests, num_others=num_others):
                return
            yield from self._return()
            self._returned = True
            self.stage = "generate"
            if self.ledger.is_enough:  # the last groups have come meanwhile
                return
            num_ready = min(self.ledger.num_ready, self._num_to_accumulate)
        if lending.has_part(num_ready, step):
            yield Accumulate(tuple(self.ledger.ready()[:num_ready]))

    @property
    def _num_to_accumulate(self) -> int:
        """Number of further groups that may be accumulated: those of the first minibatch, as the weights must not
        change before the others are trained."""
        return -(-self.ledger.groups_per_step // self.spec.minibatches) - self.ledger.trained_now

    def _return(self) -> Iterator[Command]:
        """Stop the engines whose cards train now, and return these."""
        self.stage = "stop"
        yield from self._stop_shared()
        self.stage = "switch"
        yield SwitchToTrain()

    def _publish(self, overlapped: tuple[int, ...] = ()) -> Iterator[Command]:
        self._returned = False
        yield Publish(self.ledger.version, overlapped)
        self.buffer.observe_new_weights()

    @property
    def _must_publish_again(self) -> bool:
        """Whether requests wait or may be admitted for which no engine is left, or all are done with their last."""
        waiting = self.buffer.num("waiting")
        if self._supply.dispatches_once:
            return not self.running.total and bool(waiting)
        return not self.running and bool(waiting or self._supply.num_admissible)

    def _publish_again(self, share: InferenceShare) -> Iterator[Command]:
        """Publish to all engines, replaced ones, too, and dispatch the requests that wait."""
        self.stage = "switch"
        self._lent_s += self._lending.interrupt()
        yield from self.stop()
        if not self._returned:
            yield SwitchToTrain()
        yield from self._publish()
        self.stage = "generate"
        yield from self._supply.dispatch(share.engines, last=self._supply.dispatches_once)

    def _stop_shared(self) -> Iterator[Command]:
        """Stop the engines whose cards train now, and dispatch their requests to the others. At staleness 0, where
        the others have none, stops all: they report their figures in the step that they belong to."""
        stopping = tuple(engine for engine in self.running if engine in self.spec.shared_engines or not self.spec.ahead)
        if stopping:
            yield Suspend(stopping, to_train=True)
        if self.spec.shared_engines:
            yield from self._supply.dispatch()

    def _admit_shorter(self) -> Iterator[Command]:
        """Admit further groups to a step that lacks tokens, because its groups were shorter than expected."""
        if self.ledger.tokens_per_step is not None:
            yield from self._supply.admit()
            yield from self._supply.dispatch()

    def _overlapped(self, share: InferenceShare) -> tuple[int, ...]:
        """Return the engines that can receive new weights while they generate: all that share no card with the
        trainer, if exactly these run, and are to continue with the same settings; else none."""
        separate = [engine for engine in range(self.spec.num_engines) if engine not in self.spec.shared_engines]
        if not self.spec.ahead or share != self._share or list(self.running) != separate:
            return ()
        return tuple(separate) if {*separate} <= {*share.engines} else ()

    @property
    def _can_replace_filtered(self) -> bool:
        """Whether a step that lacks groups because some were filtered may admit replacements."""
        lacks = 0 < self._num_filtered <= self.spec.max_filtered_groups and not self.ledger.is_enough
        return lacks and bool(self.ledger.in_flight or self._supply.num_admissible)

    @property
    def _cannot_train_yet(self) -> bool:
        """Whether groups in flight must be trained before the next version, because finished groups have failed."""
        return bool(self.ledger.in_flight) and self.ledger.num_due > self.ledger.num_ready
