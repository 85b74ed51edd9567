"""The update step against a real queue, with cards that only read: nothing is trained twice, lost, or read back."""

from types import SimpleNamespace

import pytest
import torch

from distqueue import LocalQueue, PackedBatch
from fusion.colocate import Worker
from fusion.model import Parallel
from fusion.rewards import RewardOutcome
from fusion.telemetry import Metrics
from fusion.training import AlgorithmConfig
from fusion.training.algorithms import make_algorithm
from stalesync.prompts import Prompt
from stalesync.samples import ScoredSample
from stalesync.update import Updater

GROUPS, GROUP = 3, 2
READS = ("get", "get_async", "read", "stats")


class Killed(Exception):
    pass


class ControllersQueue:
    """The queue as the controller has it: it counts calls, and dies at a given one."""

    def __init__(self, queue, dies_at=None):
        self._queue, self._dies_at, self.calls = queue, dies_at, []

    def __getattr__(self, name):
        assert name not in READS, f"the update step reads back by {name!r}"

        def call(*args):
            self.calls.append(name)
            if len(self.calls) == self._dies_at:
                raise Killed(name)
            return getattr(self._queue, name)(*args)

        return call


class TrainingCards:
    """Reads what it is told to train, as a card does, and counts how often each sample was trained."""

    def __init__(self, queue, dies=False):
        self._queue, self._dies, self.trained = queue, dies, []

    def on(self, ranks):
        return self

    def call(self, stage, minibatches, version):
        assert stage is Worker.train
        for shares in minibatches:
            for ids in shares:
                batch = self._queue.read(ids, ["response", "advantage"])
                assert list(batch.ids) == ids
                self.trained += ids
        if self._dies:
            raise Killed(stage.__name__)
        return []


def _scored(lost=()):
    groups = {}
    for group in range(GROUPS):
        prompt = Prompt(f"g{group}", (1, 2), "1+1=", "2")
        for member in range(GROUP):
            id = f"g{group}/{member}"
            outcome = RewardOutcome(None, "raised") if id in lost else RewardOutcome(float(member))
            groups.setdefault(prompt.id, []).append(ScoredSample(id, prompt, "2", 2, 3, outcome))
    return groups


def _queue(groups):
    queue = LocalQueue(["reward", "train"], lease_s=1000)
    ids = [sample.id for members in groups.values() for sample in members]
    queue.put(PackedBatch.from_samples([*ids, "other"], {"response": [torch.arange(3)] * (len(ids) + 1)}))
    queue.ack("reward", queue.get("reward", ["response"], len(ids) + 1).ids)
    return queue


def _updater(queue, cards):
    config = AlgorithmConfig(group_size=GROUP, minibatches=2)
    spec = SimpleNamespace(algorithm=config, reference=None, train=Parallel(1), deployment=SimpleNamespace(train=(0,)))
    view = SimpleNamespace(phase=lambda name: None)
    algorithm = make_algorithm(config, 8)
    parts = {"spec": spec, "cards": cards, "queue": queue, "view": view, "algorithm": algorithm}
    return Updater(**parts, record_reports=lambda reports: None)


def test_every_scored_sample_is_claimed_written_trained_and_acknowledged_once():
    groups = _scored(lost=["g1/0"])
    queue = _queue(groups)
    seen, cards = ControllersQueue(queue), TrainingCards(queue)
    _updater(seen, cards).train(groups, 0, Metrics())
    assert sorted(cards.trained) == ["g0/0", "g0/1", "g1/1", "g2/0", "g2/1"]
    assert seen.calls == ["drop", "claim", "put", "ack"]
    figures = queue.stats()
    assert figures["distqueue/ended/done"] == 5 and figures["distqueue/ended/dropped:reward_raised"] == 1
    assert figures["distqueue/rows"] == 1, "a sample that the ledger did not name stays as it was"


def test_a_sample_that_was_trained_or_is_being_trained_is_refused_by_name_and_trained_by_nobody():
    groups = _scored()
    queue = _queue(groups)
    queue.claim("train", ["g2/1"])
    cards = TrainingCards(queue)
    with pytest.raises(ValueError, match="sample 'g2/1': task 'train' has leased it already"):
        _updater(queue, cards).train(groups, 0, Metrics())
    queue.ack("train", ["g2/1"])
    with pytest.raises(ValueError, match="sample 'g2/1': done"):
        _updater(queue, cards).train(groups, 0, Metrics())
    assert not cards.trained and queue.stats()["distqueue/train/leased"] == 0


@pytest.mark.parametrize("dies_at", [1, 2, "train", 3])
def test_an_update_that_is_killed_at_any_point_leaves_every_sample_untrained_in_the_queue(dies_at):
    groups = _scored()
    queue = _queue(groups)
    seen = ControllersQueue(queue, dies_at)
    with pytest.raises(Killed):
        _updater(seen, TrainingCards(queue, dies=dies_at == "train")).train(groups, 0, Metrics())
    figures = queue.stats()
    assert figures["distqueue/rows"] == 7 and "distqueue/ended/done" not in figures, "an ack is the last thing done"
