"""A queue, scored groups, and cards that only read, for tests of the update step."""

from types import SimpleNamespace

import torch

from distqueue import LocalQueue, PackedBatch
from fusion.colocate import Worker
from fusion.model import Parallel
from fusion.rewards import RewardOutcome
from fusion.telemetry import Metrics
from fusion.training import AlgorithmConfig, TrainingConfig
from fusion.training.algorithms import make_algorithm
from stalesync.cards.stage_calls import RunningStage
from stalesync.loop.sample_columns import SampleColumns
from stalesync.loop.update import Updater
from stalesync.prompts import Prompt
from stalesync.scoring.samples import Sample

GROUPS, GROUP = 3, 2
READS = ("get", "fetch", "read", "stats")


class Killed(Exception):
    pass


class ControllersQueue:
    """The queue as the controller has it: it counts calls, and dies at a given one."""

    def __init__(self, queue, dies_at=None):
        self._queue, self._dies_at, self.calls = queue, dies_at, []

    def __getattr__(self, name):
        assert name not in READS, f"the update step reads back by {name!r}"

        def call(*args, **options):
            self.calls.append(name)
            if len(self.calls) == self._dies_at:
                raise Killed(name)
            return getattr(self._queue, name)(*args, **options)

        return call


class TrainingCards:
    """Reads what it is told to train, as a card does, and counts how often each sample was trained."""

    def __init__(self, queue, dies=False):
        self._queue, self._dies, self.trained, self.has_lost = queue, dies, [], False
        self.num_samples = []
        """Of each minibatch"""

    def begin_each(self, calls):
        for call in calls.values():
            assert call.stage == Worker.train.__name__
            self._train(*call.args)
        return RunningStage(Worker.train.__name__, tuple(calls), {})

    def wait(self, running):
        if self._dies:
            raise Killed(Worker.train.__name__)
        return [SimpleNamespace(has_lost=False), SimpleNamespace(has_lost=self.has_lost)]

    def _train(self, minibatches):
        for ids in minibatches:
            self.num_samples.append(len(ids))
            if ids:
                batch = self._queue.read(ids, ["response", "advantage"])
                assert list(batch.ids) == ids
                self.trained += ids


def scored_groups(lost=()):
    groups = {}
    for group in range(GROUPS):
        prompt = Prompt(f"g{group}", (1, 2), "1+1=", "2")
        for member in range(GROUP):
            id = f"g{group}/{member}"
            outcome = RewardOutcome(None, "raised") if id in lost else RewardOutcome(float(member))
            sample = Sample(id, prompt, "2", 2, 3)
            sample.outcome = outcome
            groups.setdefault(prompt.id, []).append(sample)
    return groups


def queue_of(groups, kind=LocalQueue):
    queue = kind(["reward", "train"], lease_s=1000)
    ids = [row for members in groups.values() for sample in members for row in sample.rows]
    queue.put(PackedBatch.from_samples([*ids, "other"], {"response": [torch.arange(3)] * (len(ids) + 1)}))
    queue.ack("reward", queue.get("reward", ["response"], len(ids) + 1).ids)
    return queue


def updater_of(queue, cards, *, turns=False, **algorithm):
    config = AlgorithmConfig(group_size=GROUP, minibatches=2, **algorithm)
    deployment = SimpleNamespace(train=(0,))
    parts = {"reference": None, "train": Parallel(1), "deployment": deployment, "turns": turns}
    spec = SimpleNamespace(algorithm=config, training=TrainingConfig(), **parts)
    view = SimpleNamespace(phase=lambda name: None)
    algorithm = make_algorithm(config, 8)
    parts = {"spec": spec, "cards": cards, "queue": queue, "view": view, "algorithm": algorithm}
    return Updater(**parts, record_reports=lambda reports: None)


def run_update(updater, groups, *, update=True):
    samples, metrics = SampleColumns.of([sample for members in groups.values() for sample in members]), Metrics()
    training = updater.begin(list(groups), samples, 0, metrics, update=update)
    return updater.finish(training, metrics)


def run_training(updater, groups):
    run_update(updater, groups)
    updater.acknowledge()
