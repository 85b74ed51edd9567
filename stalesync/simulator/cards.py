"""Execute the stages of all cards in virtual time: switches, engines, training; and score by rules.

    publish ─► ready ─► engines … stopped ─► return ─► train ─► publish …          cards that train
    publish overlapped ─► received ─► engines adopt between two steps              cards that only generate

A card runs its stages one after the other. A stage of several cards begins when the last of them has been called and
is free, and ends on all of them at once, as on paced cards."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fusion.costmodel.pace import TrainerCost
from fusion.model.prefixes import links
from fusion.rewards.batch_size import ScoringBatch
from fusion.rollout import SuspendedSample
from fusion.training.division import split_groups, split_over_ranks
from stalesync.simulator.clock import Clock
from stalesync.simulator.engine import SimulatedEngine
from stalesync.simulator.lengths import SimulatedPrompt
from stalesync.simulator.sequence import RequestSize, SimulatedRequest
from stalesync.simulator.setup import SimulationSetup

Share = tuple[list[int], list[int]]
"""Samples of a replica: tokens of each, and how many it has in common with the one before it"""


@dataclass(frozen=True)
class CardMessage:
    """What an engine reports to the controller: samples (response tokens by id) or requests at the end of a chunk or
    turn. Environments report samples, too, and ``returned``: tokens of observations by id; rewards ``scored``: ids of
    samples."""

    engine: int | None
    samples: Mapping[str, int]
    chunks: Sequence[SuspendedSample] = ()
    returned: Mapping[str, int] = field(default_factory=dict)
    scored: Sequence[str] = ()


class SimulatedCards:
    """``arrived``: messages that the controller has not taken yet. Seconds are totals since the start: ``switch_s``
    of card-seconds in switches, ``queue_busy_s`` of the queue's actor."""

    def __init__(
        self, setup: SimulationSetup, clock: Clock, size_of: Callable[[SimulatedRequest], RequestSize]
    ) -> None:
        self.setup, self.clock = setup, clock
        self.engines = [
            SimulatedEngine(
                number,
                setup.engine_of(dies),
                clock,
                size_of=size_of,
                put=self._put,
                put_chunks=self._put_chunks,
                note_stopped=self._note_stopped,
            )
            for number, dies in enumerate(setup.worker.engines)
        ]
        self.cards_of_engine = len(setup.worker.engines[0])
        self.training_factor = setup.slow_dies.factor(setup.config.run.seed, setup.worker.deployment.train)
        """Factor of the slowest die that trains"""
        self._num_accumulated = 0
        """Number of groups that were trained without an optimizer step since the last one"""
        self.arrived: deque[CardMessage] = deque()
        self.switch_s = self.queue_busy_s = 0.0
        self._queue_free_s = 0.0
        self._finished: Counter[str] = Counter()
        """Group → responses that have finished, where there are drafts"""
        self.ready_s = 0.0
        """Time from which the published weights are on the cards that generate"""
        self._stopped: dict[int, Sequence[SuspendedSample]] = {}
        """Stopped engines whose unfinished requests were not taken yet"""
        self._trainers_free_s = 0.0
        """Time at which the last engine on cards that train has stopped"""
        self._called_s: float | None = None
        """Time at which the cards that train were called to return; None: they were not"""
        self._loaded_s = 0.0
        """Time at which the optimizer's state is loaded"""
        self._scorers_free_s = 0.0
        """Time at which cards that only score have ended what they were called for"""
        self._referenced_s: dict[str, float] = {}
        """Group → time at which the reference on such cards has ended it"""
        self._rules = SimulatedRules(setup.config.scoring_s, clock, self._report_scored)

    # Weights

    def publish(self) -> None:
        """Begin to switch all cards of the actor for generation."""
        self.ready_s = self.clock.now + self.setup.switch.infer_s
        self._trainers_free_s = self.ready_s
        self.switch_s += self.setup.switch.infer_s * len(self.setup.worker.deployment.actor)

    def publish_overlapped(self, version: int, overlapped: Sequence[int]) -> None:
        """Send weights to engines that run, and switches the other cards; return when all have adopted them."""
        self.publish()
        self.clock.advance_to(self.ready_s)
        for number in overlapped:
            self.engines[number].adopt(version)
        self.clock.wait_for(lambda: all(self.engines[number].adopted == version for number in overlapped))

    def begin_return(self) -> None:
        """Call the cards that train to return as soon as they are free, unless that is done."""
        if self._called_s is None:
            self._called_s = self.clock.now

    @property
    def all_stopped(self) -> bool:
        """Whether no engine runs: those that were started have stopped by themselves."""
        return not any(engine.running for engine in self.engines)

    def switch_to_train(self) -> None:
        """Return the cards that train; return when they have."""
        self.begin_return()
        assert self._called_s is not None
        returned_s = max(self._called_s, self._trainers_free_s) + self.setup.switch.train_s
        self._called_s = None
        self.switch_s += self.setup.switch.train_s * len(self.setup.worker.deployment.train)
        self._loaded_s = returned_s + self.setup.switch.onload_s
        self.clock.advance_to(returned_s)

    # Engines

    def start(self, number: int, requests: Sequence[SimulatedRequest], version: int, *, stay: bool) -> None:
        """Start an engine behind the switch of its cards."""
        self.engines[number].start(requests, version, time=self.ready_s, stay=stay)

    def suspend(self, numbers: Sequence[int]) -> dict[int, Sequence[SuspendedSample]]:
        """Stop engines between two steps; return the unfinished requests of each."""
        for number in numbers:
            self.engines[number].pause()
        self.clock.wait_for(lambda: all(number in self._stopped for number in numbers))
        return {number: self._stopped.pop(number) for number in numbers}

    def _note_stopped(self, number: int, suspended: Sequence[SuspendedSample]) -> None:
        self._stopped[number] = suspended
        if number in self.setup.admission.shared_engines:
            self._trainers_free_s = self.clock.now

    # Training

    def begin_training(self, groups: Mapping[str, SimulatedPrompt], update: bool = True) -> float:
        """Begin to train groups, oldest first, whose responses are whole; return the time of its end. ``update``: with
        optimizer steps, else gradients are accumulated."""
        time, trainer = self.clock.now, self.setup.trainer
        replicas = self.setup.worker.train.replicas
        number = self.setup.config.algorithm.minibatches if update else 1
        chunks = split_groups(list(groups), number, self._num_accumulated if update else 0)
        self._num_accumulated = 0 if update else self._num_accumulated + len(groups)
        minibatches = [_split([groups[name] for name in chunk], trainer) for chunk in chunks]
        if self.setup.worker.reference is not None:
            time = max([time, *[self._referenced_s.pop(group) for group in groups]])
        elif (reference := self.setup.reference) is not None:
            longest_s = max(self._reference_s(reference, minibatches, replica) for replica in range(replicas))
            time += longest_s * self.training_factor
        for number, shares in enumerate(minibatches):
            longest_s = max(sum(trainer.train(*share).values()) for share in shares)
            time += longest_s * self.training_factor
            if update:
                time = max(time, self._loaded_s) if number == 0 else time
                time += sum(self.setup.trainer.update().values()) * self.training_factor
        return time

    @staticmethod
    def _reference_s(cost: TrainerCost, minibatches: Sequence[Sequence[Share]], replica: int) -> float:
        lengths, common = ([share for shares in minibatches for share in shares[replica][i]] for i in range(2))
        return sum(cost.forward(lengths, "logprobs", common).values())

    # Scoring

    def begin_reference(self, groups: Mapping[str, SimulatedPrompt]) -> None:
        """Begin the pass of the reference over complete groups, whose responses are whole, on cards of its own."""
        assert self.setup.reference is not None
        shares = _split([*groups.values()], self.setup.reference)
        self._scorers_free_s = self._scored_s(self.setup.reference, shares, "logprobs")
        self._referenced_s |= dict.fromkeys(groups, self._scorers_free_s)

    def begin_scoring(self, tokens_by_id: Mapping[str, int]) -> None:
        """Begin to score samples by the reward model on cards of its own."""
        self._scorers_free_s = self.scored_s(tokens_by_id.values())
        self._deliver(self._scorers_free_s, CardMessage(None, {}, scored=[*tokens_by_id]))

    def scored_s(self, lengths: Iterable[int]) -> float:
        """Return the time at which the reward model will have scored samples of these lengths."""
        assert self.setup.reward is not None
        samples = [SimulatedPrompt("", 0, [tokens]) for tokens in lengths]
        return self._scored_s(self.setup.reward, _split(samples, self.setup.reward), "score")

    def _scored_s(self, cost: TrainerCost, shares: Sequence[Share], kind: str) -> float:
        seconds = [sum(cost.forward(lengths, kind, common).values()) for lengths, common in shares]
        return max(self.clock.now, self._scorers_free_s) + max(seconds)

    # Messages

    def _put(self, engine: int, samples: Mapping[str, int]) -> None:
        """Send samples through the queue, whose actor handles one message after the other."""
        overheads = self.setup.overheads
        begins_s, takes_s = max(self.clock.now, self._queue_free_s), len(samples) * overheads.queue_s_per_sample
        self._queue_free_s = begins_s + takes_s
        self.queue_busy_s += takes_s
        self._deliver(self._queue_free_s + overheads.arrival_s, CardMessage(engine, samples))
        if self.setup.engine.drafts is not None:
            self._share_text(samples)

    def _share_text(self, samples: Iterable[str]) -> None:
        """Report to the engines which responses have finished, whose siblings they draft from."""
        groups = [id.rsplit("/", 1)[0] for id in samples]
        self._finished.update(groups)
        for group in dict.fromkeys(groups):
            for engine in self.engines:
                engine.observe_finished(group, self._finished[group])

    def _report_scored(self, samples: Mapping[str, int], scored: Sequence[str]) -> None:
        self.arrived.append(CardMessage(None, samples, scored=scored))

    def answer(self, id: str, observation_tokens: int, response_tokens: int, seconds: float) -> None:
        """Let an environment answer after some seconds; it ends the conversation if there is no observation."""
        if observation_tokens:
            message = CardMessage(None, {}, returned={id: observation_tokens})
        else:
            message = CardMessage(None, {id: response_tokens})
        self._deliver(self.clock.now + seconds, message)

    def _put_chunks(self, engine: int, suspended: Sequence[SuspendedSample]) -> None:
        self._deliver(self.clock.now + self.setup.overheads.arrival_s, CardMessage(engine, {}, suspended))

    def _deliver(self, time: float, message: CardMessage) -> None:
        if message.samples and self.setup.config.reward.latency_s:
            self.clock.at(time, lambda: self._rules.put(message.samples))
        else:
            self.clock.at(time, lambda: self.arrived.append(message))


def _split(groups: Sequence[SimulatedPrompt], cost: TrainerCost) -> list[Share]:
    """Divide the samples of groups over a model's replicas, as a run does: siblings have their prompt in common."""
    samples = [(tokens, number) for number, group in enumerate(groups) for tokens in group.sample_tokens]

    def shared(indices: Sequence[int]) -> Share:
        """Return some of the samples, in this order."""
        chosen = [samples[index] for index in indices]
        pairs = zip(chosen, [(0, -1), *chosen], strict=False)
        common = [groups[number].prompt_tokens if number == before else 0 for (_, number), (_, before) in pairs]
        return [tokens for tokens, _ in chosen], common

    lengths, common = shared(range(len(samples)))
    divided = split_over_ranks(lengths, cost.layout.replicas, links(lengths, common, cost.share_prefixes))
    return [shared(indices) for indices in divided]


class SimulatedRules:
    """Score samples by a rule, in batches as `stalesync/scoring/scoring.py`, whose scores come together:

        samples arrive ─► wait for the batch before ─► reported as generated ─► `reward.workers` processes ─► scored

    ``scoring_s``: seconds of a batch by its size; ``report``: receives generated samples, and ids of scored ones.

    Invariants (property-tested): each sample is reported as generated once and, `reward.latency_s` later or more, as
    scored once; n samples take at least n × latency / workers; with twice the latency the last one is not earlier."""

    def __init__(
        self,
        scoring_s: Callable[[int], float],
        clock: Clock,
        report: Callable[[Mapping[str, int], Sequence[str]], None],
    ) -> None:
        self._scoring_s, self._clock, self._report = scoring_s, clock, report
        self._waiting: deque[tuple[str, int]] = deque()
        self._batch_size, self._is_busy = ScoringBatch(), False

    def put(self, samples: Mapping[str, int]) -> None:
        """Receive samples that have arrived, response tokens by id."""
        self._waiting += samples.items()
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        batch = dict(self._waiting.popleft() for _ in range(min(self._batch_size.count, len(self._waiting))))
        self._is_busy = bool(batch)
        if batch:
            seconds = self._scoring_s(len(batch))
            self._report(batch, ())
            self._clock.at(self._clock.now + seconds, lambda: self._end([*batch], seconds))

    def _end(self, batch: Sequence[str], seconds: float) -> None:
        self._report({}, batch)
        self._batch_size.observe(len(batch), seconds)
        self._begin()
