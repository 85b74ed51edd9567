"""Run the loop in virtual time: obey the commands of `policy/admission.py` as `loop/controller.py` does.

    Admission.step, feed ─ commands ─► SimulatedRun ─► SimulatedCards ─► engines, switches, training
           ▲                                                                     │ messages, unfinished requests
           └────────── observe_… ◄───────────────────────────────────────────────┘

The decisions are those of the real objects: ledger, request buffer and admission are driven, not imitated. The
controller is one process: what it computes and every call of a card takes its time, during which events of the cards
go on. Rewards by rules take `reward.latency_s`, those of a reward model its forward pass; no group is filtered."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from fusion.rollout import SuspendedSample
from fusion.rollout.types import conversation_of
from stalesync.policy.admission import STEP_TAIL, Admission
from stalesync.policy.commands import (
    Accumulate,
    AdmitGroups,
    AwaitSamples,
    Command,
    Dispatch,
    Publish,
    Score,
    Suspend,
    SwitchToTrain,
    Train,
    only_starts,
)
from stalesync.policy.staleness import StalenessLedger
from stalesync.process.garbage import collecting_seldom
from stalesync.simulator.cards import CardMessage, SimulatedCards
from stalesync.simulator.clock import Clock
from stalesync.simulator.lengths import SimulatedLengths, SimulatedPrompt
from stalesync.simulator.sequence import RequestSize, SimulatedRequest
from stalesync.simulator.setup import SimulationSetup
from stalesync.simulator.work import RunTotals, SimulatedWork, StepRecord

FEW_SAMPLES = 4096
"""Samples in progress up to which the collections of garbage take less time than excluding the objects that exist"""


class SimulatedRun:
    """Simulate the steps of ``setup.config.run``."""

    def __init__(self, setup: SimulationSetup, lengths: SimulatedLengths) -> None:
        config = setup.config
        self.setup, self._lengths = setup, lengths
        self.clock = Clock()
        ledger = StalenessLedger(
            config.stalesync.max_staleness, config.data.prompts_per_step, config.stalesync.train_tokens
        )
        self.admission = Admission(setup.admission, ledger)
        self.cards = SimulatedCards(setup, self.clock, self._size_of)
        self.steps: list[StepRecord] = []
        self._prompts: dict[str, SimulatedPrompt] = {}
        """Prompts of the groups that have not ended, by name"""
        self._unscored: dict[str, int] = {}
        """Group → samples that have not arrived yet"""
        self._waiting: dict[str, int] = {}
        """Samples → tokens, which the reward model on cards that train has not scored"""
        self._record = StepRecord()
        self._publishing = self._stopping = False
        """Whether the cards switch for the engines; whether the engines stop by themselves"""
        self._training_s = 0.0

    def run(self) -> list[StepRecord]:
        steps = self.setup.config.run.steps
        config = self.setup.config
        ahead = 1 + config.stalesync.max_staleness
        samples = ahead * config.data.prompts_per_step * config.algorithm.group_size
        with collecting_seldom(samples) if samples > FEW_SAMPLES else nullcontext():
            for step in range(1, steps + 1):
                self._record, start_s = StepRecord(), self.clock.now
                for command in self.admission.step(steps - step + 1, self.setup.share):
                    self.execute(command)
                self._record.seconds = self.clock.now - start_s
                self.steps.append(self._record)
                if (tokens := self.setup.engine.limits.max_kv_tokens) is not None:
                    self.admission.observe_kv_tokens(tokens * self.setup.engine.num_ranks)
            for command in self.admission.stop():
                self.execute(command)
        return self.steps

    def execute(self, command: Command) -> None:
        """Execute a command, and report its results to `Admission`."""
        if self._publishing and not only_starts(command):
            self._end_publish()
        start_s, record = self.clock.now, self._record
        match command:
            case Publish():
                self._publish(command)
                record.switch_s += self.clock.now - start_s
            case AdmitGroups(count):
                self._admit(count)
            case Dispatch():
                self._dispatch(command)
            case AwaitSamples():
                self._await_samples()
                record.generate_s += self.clock.now - start_s
            case Suspend(engines, to_train):
                if to_train:
                    self.cards.begin_return()
                self._suspend(engines)
                record.generate_s += self.clock.now - start_s
            case SwitchToTrain():
                self._call(len(self.setup.worker.deployment.train))
                self.cards.switch_to_train()
                record.switch_s += self.clock.now - start_s
            case Score():
                self._score()
            case Accumulate(groups):
                self._train(groups, update=False)
                record.train_s += self.clock.now - start_s
            case Train(groups):
                self._train(groups)
                record.train_s += self.clock.now - start_s
        self.admission.observe_seconds(command, self.clock.now - start_s)

    def totals(self) -> RunTotals:
        """Return the totals of all steps. Called at the end of the run, when all engines have stopped."""
        engines, cards, scale = self.cards.engines, self.cards, self.setup.engine.cost.pace.token_scale
        done, first = SimulatedWork.sum(step.work for step in self.steps), (scale - 1) / scale
        begun = sum(engine.first_tokens for engine in engines)
        done.decodes = sum(engine.decoded_tokens for engine in engines) + begun * first
        done.contexts = sum(engine.context_sum for engine in engines)
        size = cards.cards_of_engine
        training_card_s = self._training_s * len(self.setup.worker.deployment.train)
        nominal = self.setup.engine.cost.pace.time_scale
        slow_s = sum(engine.busy_s * (1 - engine.spec.cost.pace.time_scale / nominal) for engine in engines)
        pauses = sum(engine.adoptions for engine in engines) * self.setup.engine.adopt_s
        return RunTotals(
            generating_card_s=sum(engine.busy_s for engine in engines) * size,
            switching_card_s=cards.switch_s + (pauses + sum(engine.kv_copy_s for engine in engines)) * size,
            training_card_s=training_card_s,
            slow_card_s=slow_s * size + training_card_s * (1 - 1 / cards.training_factor),
            preemptions=sum(engine.preemptions for engine in engines),
            done=done,
        )

    # Commands

    def _publish(self, command: Publish) -> None:
        self._call(len(self.setup.worker.deployment.actor))
        if command.overlapped:
            self.cards.publish_overlapped(command.version, command.overlapped)
        else:
            self.cards.publish()
            self._publishing = True

    def _end_publish(self) -> None:
        """Wait until the cards have switched for the engines, which may have been started meanwhile."""
        start_s, self._publishing = self.clock.now, False
        self.clock.advance_to(self.cards.ready_s)
        self._record.switch_s += self.clock.now - start_s

    def _admit(self, count: int) -> None:
        prompts = self._lengths.next(count)
        for prompt in prompts:
            self._prompts[prompt.group] = prompt
            self._unscored[prompt.group] = len(prompt.response_tokens)
        self.admission.observe_admitted({prompt.group: prompt.prompt_tokens for prompt in prompts})

    def _dispatch(self, command: Dispatch) -> None:
        self._stopping = command.last
        for engine, rows in command.requests_by_engine.items():
            columns = rows.ids, rows.groups, rows.earlier, rows.kv_ranks, rows.priorities, rows.kv_tokens
            requests, starting = list(map(SimulatedRequest, *columns)), engine in command.starting
            self._call(self.cards.cards_of_engine if starting else 1)
            if starting:
                version = self.admission.ledger.version
                self.cards.start(engine, requests, version, stay=not command.last)
            else:
                self.cards.engines[engine].submit(requests)
        for engine, forgotten in command.forget_by_engine.items():
            self.cards.engines[engine].forget(forgotten)

    def _await_samples(self) -> None:
        ledger, size = self.admission.ledger, self.setup.admission.group_size
        start_s, cards = self.clock.now, self.cards
        if self._stopping and (cards.all_stopped or self._one_engine_has_all_trainers):
            cards.begin_return()
        in_tail = self.admission.buffer.num("running") <= STEP_TAIL * ledger.expected_groups * size
        self.clock.wait_for(lambda: bool(cards.arrived))
        self._observe_arrived()
        if in_tail:
            self._record.tail_s += self.clock.now - start_s

    @property
    def _one_engine_has_all_trainers(self) -> bool:
        running = [engine.number for engine in self.cards.engines if engine.running]
        if len(running) != 1:
            return False
        return {*self.setup.worker.engines[running[0]]} >= {*self.setup.worker.deployment.train}

    def _suspend(self, engines: Sequence[int]) -> None:
        if not self._stopping:
            self._call(len(engines))
        for engine, suspended in self.cards.suspend(engines).items():
            self.admission.observe_stopped(engine, self._merged(suspended))

    def _train(self, groups: Sequence[str], update: bool = True) -> None:
        """Train groups, while cards that do not train generate; without ``update`` it accumulates their gradients."""
        config, ledger, record = self.setup.config, self.admission.ledger, self._record
        prompts = [self._prompts.pop(group) for group in groups]
        record.groups += groups
        record.lags += [ledger.lag(group) for group in groups]
        scale = self.setup.engine.cost.pace.token_scale
        whole = {prompt.group: self._whole(prompt) for prompt in prompts}
        for one in prompts:
            record.work.generate(one.prompt_tokens, one.response_tokens, scale, self.setup.environment)
            record.work.train(whole[one.group], self.setup.trainer)
        record.work.updates = config.algorithm.minibatches if update and groups else 0
        record.tokens += sum(sum(prompt.sample_tokens) for prompt in whole.values())
        if groups:
            reference = self.setup.reference is not None and self.setup.worker.reference is None
            self._call(len(self.setup.worker.deployment.train) * (1 + reference))
            start_s, end_s = self.clock.now, self.cards.begin_training(whole, update)
            self._training_s += end_s - start_s
            self.clock.at(end_s, lambda: None)
            while self.clock.now < end_s:
                self.clock.wait_for(lambda: bool(self.cards.arrived) or self.clock.now >= end_s)
                self._observe_arrived()
                for command in self.admission.feed():
                    self.execute(command)
        (self.admission.observe_trained if update else self.admission.observe_accumulated)(groups)

    # Observations

    def _observe_arrived(self) -> None:
        """Report what has arrived to `Admission`."""
        messages: list[CardMessage] = []
        while self.cards.arrived:
            messages.append(self.cards.arrived.popleft())
        generated = {id: tokens for message in messages for id, tokens in message.samples.items()}
        self._compute(len(generated) * self.setup.overheads.controller_s_per_sample)
        self.admission.observe_generated(generated)
        scored = [id for message in messages for id in message.scored]
        if self.setup.reward is None:
            scored += () if self.setup.config.reward.latency_s else generated
        elif generated:
            sizes = {id: self._prompts[id.rsplit("/", 1)[0]].prompt_tokens + generated[id] for id in sorted(generated)}
            if self.setup.admission.scores_overlapped:
                self._call(len(self.setup.worker.deployment.reward_model))
                self.cards.begin_scoring(sizes)
            else:
                self._waiting |= sizes
        self._observe_scored(scored)
        for message in messages:
            if message.engine is not None and message.chunks:
                self.admission.observe_chunks_ended(message.engine, self._merged(message.chunks))
                for one in message.chunks:
                    if one.turn:
                        self._begin_answer(one)
            for id, tokens in message.returned.items():
                self._return(id, tokens)

    def _score(self) -> None:
        """Score what waits by the reward model on the cards that train."""
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._call(len(self.setup.worker.deployment.reward_model))
            self.clock.advance_to(self.cards.scored_s(waiting.values()))
            self._observe_scored(waiting)

    def _observe_scored(self, samples: Iterable[str]) -> None:
        complete: dict[str, SimulatedPrompt] = {}
        for id in sorted(samples):
            group = id.rsplit("/", 1)[0]
            self._unscored[group] -= 1
            if not self._unscored[group]:
                del self._unscored[group]
                complete[group] = self._whole(self._prompts[group])
                self.admission.observe_scored(group, sum(complete[group].sample_tokens))
        worker = self.setup.worker
        if complete and worker.reference is not None:
            calls = [complete] if worker.ahead else [{group: whole} for group, whole in complete.items()]
            for groups in calls:
                self._call(len(worker.deployment.reference))
                self.cards.begin_reference(groups)

    def _begin_answer(self, turn: SuspendedSample) -> None:
        """Have the environment answer to a turn that has ended."""
        environment, seed = self.setup.environment, self.setup.config.run.seed
        assert environment is not None
        id = conversation_of(turn.id)
        seconds = self.setup.engine.cost.pace.run_seconds(environment.draw_latency_s(seed, id, turn.generated))
        ended = turn.generated == environment.turn_ends(self._sampled(id))[-1]
        self.cards.answer(id, 0 if ended else environment.observation_tokens, turn.generated, seconds)

    def _return(self, id: str, observation_tokens: int) -> None:
        """Return a conversation with what its environment has answered, in another branch if one begins."""
        environment, config, generated = self.setup.environment, self.setup.config, self._generated(id)
        assert environment is not None
        if environment.branches(config.run.seed, id, generated):
            used, prompt = generated + observation_tokens, self._prompts[id.rpartition("/")[0]]
            left = config.rollout.max_response_length - used
            self.admission.observe_branched(id, prompt.prompt_tokens + used, left)
        else:
            self.admission.observe_returned(id, observation_tokens)

    def _before_branch(self, id: str) -> int:
        """Return the number of tokens of a conversation that its branch has in its prompt, behind the first one."""
        return self.admission.buffer.entries[id].prompt_tokens - self._prompts[id.rpartition("/")[0]].prompt_tokens

    def _generated(self, id: str) -> int:
        """Return the number of tokens behind the first prompt of a conversation, in all branches."""
        return self._before_branch(id) + self.admission.buffer.entries[id].generated

    def _sampled(self, id: str) -> int:
        """Return the number of tokens of a response that are sampled."""
        group, _, member = id.rpartition("/")
        return self._prompts[group].response_tokens[int(member)]

    def _whole(self, prompt: SimulatedPrompt) -> SimulatedPrompt:
        """Return a prompt with the responses of all rows, observations and earlier branches included."""
        if (environment := self.setup.environment) is None:
            return prompt
        seed, members = self.setup.config.run.seed, enumerate(prompt.response_tokens)
        rows = [environment.row_ends(seed, f"{prompt.group}/{member}", sampled) for member, sampled in members]
        return replace(prompt, response_tokens=[end for ends in rows for end in ends])

    def _merged(self, suspended: Sequence[SuspendedSample]) -> list[SuspendedSample]:
        """Return suspended samples with the version of their oldest token, which an earlier engine may have known."""
        merged = []
        for one in suspended:
            id = conversation_of(one.id)
            oldest = self.admission.buffer.entries[id].oldest
            if before := self._before_branch(id):
                one = replace(one, generated=one.generated - before)
            if one.versions is not None and oldest >= 0:
                newest = one.versions[1]
                one = replace(one, versions=(oldest, newest))
            merged.append(one)
        return merged

    def _size_of(self, request: SimulatedRequest) -> RequestSize:
        environment, id = self.setup.environment, conversation_of(request.id)
        generated, sampled = self._generated(id), self._sampled(id)
        prompt_tokens = self._prompts[request.group].prompt_tokens
        if environment is None:
            return RequestSize(prompt_tokens, generated, sampled)
        total, turn_end = environment.turn_ends(sampled)[-1], environment.turn_end(generated, sampled)
        return RequestSize(prompt_tokens, generated, total, turn_end)

    # Time of the controller

    def _call(self, num_cards: int) -> None:
        """Call cards, one after the other."""
        seconds = num_cards * self.setup.overheads.call_s
        if not self._publishing and self.cards.all_stopped:
            self._record.idle_calls_s += seconds
        self._compute(seconds)

    def _compute(self, seconds: float) -> None:
        """Spend the controller's time, while events of the cards go on."""
        self._record.controller_s += seconds
        self.clock.advance_to(self.clock.now + seconds)
