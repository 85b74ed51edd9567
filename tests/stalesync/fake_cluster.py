"""Engines, queue and scorer as `Admission` sees them, without a process or a clock: executes its commands with random
outcomes, and checks its invariants."""

from dataclasses import replace
from types import SimpleNamespace

from fusion.rollout import SuspendedSample
from stalesync.policy.admission import Admission
from stalesync.policy.admission_spec import AdmissionSpec
from stalesync.policy.commands import (
    Accumulate,
    AdmitGroups,
    AwaitSamples,
    Dispatch,
    Publish,
    Score,
    Suspend,
    SwitchToTrain,
    Train,
)
from stalesync.policy.staleness import StalenessLedger


class FakeCluster:
    """``spec`` and ``ledger`` of the run; ``outcomes``: of a group, drawn at random from `ok`, `filtered`, `failed`;
    ``death``: probability that an engine dies whenever something may happen to it."""

    def __init__(self, spec, ledger, random, outcomes=("ok", "ok", "filtered", "failed"), chunks=True, death=0.0):
        self.admission = Admission(spec, ledger)
        self.spec, self.ledger, self.random, self.outcomes, self.chunks = spec, ledger, random, outcomes, chunks
        self.engines = {}
        """Running engine → requests that it has"""
        self.death, self.dead, self.num_deaths = death, set(), 0
        """Engines that have died and are not replaced yet, and the number of all deaths"""
        self.generated, self.arriving, self.unscored = {}, [], {}
        """Tokens by request; samples on their way; group → samples that have arrived"""
        self.away, self.cancelled = set(), set()
        """Conversations whose environment has their turn, and groups of which one has failed that engines still have"""
        self.stopping = set()
        """Running engines that get no further request"""
        self.admitted, self.trained, self.filtered, self.failed = [], [], [], []
        self.num_admitted_in_step = self.num_suspended = 0
        self.weights = None
        self.in_training, self.switching = True, False
        """Whether the cards that train are in the training phase; whether cards switch for engines that may die"""
        self.num_accumulated, self.lent_s = 0, 0.0

    def run_step(self, steps_left, share, after_waiting=lambda: None):
        """Obeys one step's commands."""
        self.steps_left, self.num_admitted_in_step, waits = steps_left, 0, 0
        for command in self.admission.step(steps_left, share):
            self.execute(command)
            waits += isinstance(command, AwaitSamples)
            assert waits < 10_000, "deadlock"
            if isinstance(command, AwaitSamples):
                after_waiting()

    def execute(self, command):
        """Obeys a command, and tells how long it took."""
        self.obey(command)
        self.admission.observe_seconds(command, self.random.choice([0.0, 0.1, 5.0]))

    def obey(self, command):
        match command:
            case Publish(version, overlapped):
                self.in_training = False
                assert set(self.engines) == set(overlapped), "no other engine runs"
                assert not self.spec.shared_engines & set(overlapped)
                assert version == self.ledger.version
                self.weights = version
                assert not self.dead & set(overlapped)
                if not overlapped:
                    self.dead.clear()
                    self.switching = not self.spec.shared_engines
                elif not self.spec.shared_engines and self.dies(overlapped[0]):
                    self.stop_all()  # and the weights are published to all
                    self.dead.clear()
            case AdmitGroups(count):
                assert 0 < count
                names = [f"g{len(self.admitted) + k:04d}" for k in range(count)]
                self.admitted += names
                self.num_admitted_in_step += count
                left = self.steps_left * self.ledger.expected_groups - self.ledger.trained_now
                assert self.ledger.num_untrained + count <= left
                self.admission.observe_admitted({name: self.random.randint(1, 9) for name in names})
            case Dispatch():
                self.dispatch(command)
            case AwaitSamples():
                waited_for = any(self.engines.values()) or self.arriving or self.unscored or self.away
                assert waited_for, "nothing to wait for"
                assert self.engines or not self.away or self.num_deaths, "engines stay while conversations are away"
                if self.switching and self.engines and self.random.random() < self.death:
                    self.num_deaths += 1  # another takes its place and gets its requests
                    self.admission.buffer.forget_kv(min(self.engines))
                self.switching = False
                self.advance()
            case Suspend(engines):
                self.stopping -= {*engines}
                for engine in engines:
                    if engine in self.engines and not self.dies(engine):
                        self.admission.observe_stopped(engine, self.stop(engine))
            case SwitchToTrain():
                assert not self.spec.shared_engines & set(self.engines)
                assert not self.in_training, "its weights are in the training layout"
                self.in_training = True
            case Score():
                if not self.spec.scores_overlapped:
                    self.score()
            case Accumulate(groups):
                assert groups and self.spec.lends and self.ledger.max_staleness
                accumulated = self.ledger.trained_now + len(groups)
                assert accumulated <= -(-self.ledger.groups_per_step // self.spec.minibatches), "the first minibatch"
                self.train(groups)
                self.num_accumulated += len(groups)
                self.admission.observe_accumulated(groups)
            case Train(groups):
                self.train(groups)
                self.admission.observe_trained(groups)
                self.lent_s += self.admission.take_lent_s()

    def train(self, groups):
        assert self.in_training and not self.spec.shared_engines & set(self.engines)
        for _ in range(self.random.randint(0, 4)):
            self.advance()
            for fed in self.admission.feed():
                self.execute(fed)
        self.trained += groups

    def stop_all(self):
        """Weights could not be sent, as an engine has died: the others stop."""
        self.stopping.clear()
        for engine in list(self.engines):
            self.admission.observe_stopped(engine, self.stop(engine))

    def unstarted(self, id):
        tokens = self.generated.get(id, 0)
        return SuspendedSample(id, tokens, f"{id}~{tokens}" if tokens else "", None)

    def dispatch(self, command):
        assert not self.stopping, "engines that got their last requests"
        self.stopping = {*command.starting} if command.last else set()
        for engine in command.starting:
            assert engine not in self.engines and engine in command.requests_by_engine
            assert engine not in self.dead, "its weights are gone"
            self.engines[engine] = []
        held = {request for requests in self.engines.values() for request in requests}
        for engine, requests in command.requests_by_engine.items():
            assert engine in self.engines, "an engine that does not run"
            assert len({*map(len, vars(requests).values())}) == 1, "one value of each column"
            for id in requests.ids:
                assert id not in held and id not in self.arriving, "a request on two engines"
                held.add(id)
                self.engines[engine].append(id)
            bound = self.spec.binds_late and requests.ids
            assert not bound or len(self.engines[engine]) <= self.spec.max_requests
        for engine, ids in command.forget_by_engine.items():
            assert ids and self.spec.keeps_kv and engine < self.spec.num_engines

    def advance(self):
        """Engines finish requests or end their chunks; samples arrive; scores come, in random order."""
        ended = {}
        for engine, requests in list(self.engines.items()):
            if self.dies(engine):
                continue
            for id in list(requests):
                draw = self.random.random()
                if draw < 0.3:
                    requests.remove(id)
                    self.generated[id] = self.generated.get(id, 0) + self.random.randint(1, 9)
                    self.arriving.append(id)
                elif draw < 0.45 and self.chunks:
                    requests.remove(id)
                    ended.setdefault(engine, []).append(self.suspended(id, least=1))
                elif draw < 0.65 and self.spec.turns:
                    requests.remove(id)
                    ended.setdefault(engine, []).append(replace(self.suspended(id, least=1), turn=True))
        self.arrive(0.7)
        if self.spec.scores_overlapped and self.random.random() < 0.7:
            self.score()
        self.answer()
        for engine, samples in ended.items():
            self.admission.observe_chunks_ended(engine, samples)
            self.away |= {one.id for one in samples if one.turn and self.group_of(one.id) not in self.cancelled}
        self.note_cancelled()

    def answer(self):
        """Environments answer, end or fail."""
        for id in sorted(self.away):
            if id not in self.away:
                continue  # a sibling has failed meanwhile
            draw = self.random.random()
            if draw < 0.3:
                self.away.remove(id)
                said = self.random.randint(1, 4)
                self.generated[id] += said
                self.admission.observe_returned(id, said)
            elif draw < 0.5:
                self.away.remove(id)
                self.arriving.append(id)
            elif draw < 0.53:
                group = self.group_of(id)
                self.cancelled.add(group)
                self.admission.observe_cancelled(group, "env_raised")
                self.away = {one for one in self.away if self.group_of(one) != group}
                self.unscored.pop(group, None)
                held = {entry.id for entry in self.admission.buffer.of("running")}
                self.arriving = [one for one in self.arriving if self.group_of(one) != group or one in held]

    def note_cancelled(self):
        """Groups whose last request has come back have failed."""
        ended = self.cancelled - {entry.group for entry in self.admission.buffer.entries.values()}
        self.failed += sorted(ended)
        self.cancelled -= ended

    @staticmethod
    def group_of(id):
        return id.rsplit("/", 1)[0]

    def dies(self, engine):
        """An engine on cards that do not train may die: what it has sampled since the last end of a chunk is gone, but
        for samples on their way."""
        if not self.death or engine in self.spec.shared_engines or self.random.random() >= self.death:
            return False
        lost = [self.unstarted(id) for id in self.engines.pop(engine)]
        self.stopping.discard(engine)
        self.dead.add(engine)
        self.num_deaths += 1
        self.admission.buffer.forget_kv(engine)
        self.admission.observe_chunks_ended(engine, lost)
        self.admission.observe_stopped(engine, ())
        return True

    def arrive(self, share):
        for id in [id for id in self.arriving if self.random.random() < share]:
            self.arriving.remove(id)
            if (group := self.group_of(id)) not in self.cancelled:
                self.unscored.setdefault(group, []).append(id)
            self.admission.observe_generated({id: self.generated[id]})
        self.note_cancelled()

    def score(self):
        """All groups whose samples have arrived."""
        for group in [group for group, ids in self.unscored.items() if len(ids) == self.spec.group_size]:
            ids = self.unscored.pop(group)
            match self.random.choice(self.outcomes):
                case "ok":
                    self.admission.observe_scored(group, sum(self.generated[id] for id in ids))
                case "filtered":
                    self.filtered.append(group)
                    self.admission.observe_filtered(group, "no_signal")
                case "failed":
                    self.failed.append(group)
                    self.admission.observe_failed(group, "reward_raised")

    def stop(self, engine):
        unfinished = [self.suspended(id, least=0) for id in self.engines.pop(engine)]
        self.num_suspended += len(unfinished)
        return unfinished

    def suspended(self, id, least):
        more = self.random.randint(least, 4)
        total = self.generated[id] = self.generated.get(id, 0) + more
        version = self.ledger.version
        kv_rank = self.random.choice([None, 0]) if total else None
        return SuspendedSample(
            id,
            total,
            f"{id}~{total}" if total else "",
            (version, version) if more else None,
            kv_rank,
            kv_tokens=0 if kv_rank is None or self.spec.kv_pool is None else total,
        )

    def settle(self):
        """Stops all engines; all that is generated arrives and is scored."""
        for command in self.admission.stop():
            self.execute(command)
        self.arrive(1.1)
        self.score()
        self.note_cancelled()

    def restart(self):
        """Goes on with another `Admission`, from this one's state."""
        before, state = self.ledger, self.admission.state_dict()
        self.ledger = StalenessLedger(before.max_staleness, before.groups_per_step, before.tokens_per_step)
        self.admission = Admission(self.spec, self.ledger)
        self.admission.load_state_dict(state)
        assert self.admission.state_dict() == state


def share_of(engines, max_seqs=1):
    """In place of an `InferenceShare`."""
    return SimpleNamespace(engines=tuple(engines), max_seqs=max_seqs)


def spec_of(deployment, **changes):
    """Four engines; which of them share cards with the trainer is the deployment's."""
    shared = {"colocated": {0, 1, 2, 3}, "hybrid": {0, 1}, "separate": set()}[deployment]
    fields = dict(group_size=3, num_engines=4, engine_slots=2, max_response_tokens=100, max_filtered_groups=40)
    return AdmissionSpec(**fields | {"shared_engines": frozenset(shared)} | changes)


def with_outcome(sample, outcome):
    """Scores a sample; returns it."""
    sample.outcome = outcome
    return sample
