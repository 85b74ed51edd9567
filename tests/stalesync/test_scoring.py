"""From finished samples to rewards: the controller sees text and lengths, every sample is scored once, and answers to
held-out prompts reach nobody else."""

import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from distqueue import LocalQueue, PackedBatch
from fusion.inference import Output
from fusion.rewards import RewardOutcome
from fusion.rollout import EvalAnswer
from fusion.rollout.packing import pack_answers, pack_outputs
from stalesync.prompts import Prompt
from stalesync.samples import GeneratedSample
from stalesync.scoring import Scorer, ScoringProgress

PROMPT = Prompt("g", (3, 4, 5), "1+1=", "2")


class Source:
    """Scores by length, where it may; remembers what it was given."""

    def __init__(self, concurrent, error=None):
        self.concurrent, self.error, self.scored = concurrent, error, []

    def __call__(self, samples):
        if self.error:
            raise self.error
        self.scored += samples
        return [RewardOutcome(float(sample.response_tokens)) for sample in samples]

    def take_reports(self):
        return []


class MetadataQueue(LocalQueue):
    """Counts what leaves it by column, as the controller's handle on a queue of other processes would."""

    def __init__(self, tasks):
        super().__init__(tasks)
        self.received = {}

    def get(self, *args, **options):
        batch = super().get(*args, **options)
        for name, column in batch.columns.items():
            self.received[name] = self.received.get(name, 0) + column.buffer.nbytes
        return batch


def _output(id, tokens, version=0):
    count = len(tokens)
    return Output(id, "g", PROMPT.ids, list(tokens), [-1.0] * count, [version] * count, "stop")


def _put(queue, lengths):
    outputs = [_output(f"g/{k}", range(length), version=k) for k, length in enumerate(lengths)]
    queue.put(pack_outputs(outputs, [f"<{'ü' * length}>" for length in lengths]))


def _poll(scorer, wanted):
    generated, scored = [], []
    for _ in range(100):
        more = scorer.poll(0.1)
        generated, scored = generated + more[0], scored + more[1]
        if (len(generated), len(scored)) == wanted:
            return generated, scored
    raise AssertionError((generated, scored))


def test_samples_are_scored_by_their_text_and_lengths_and_no_token_is_received():
    queue, source = MetadataQueue(["reward", "train"]), Source(concurrent=True)
    with Scorer(source, queue) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [4, 2])
        generated, scored = _poll(scorer, (2, 2))
    assert [sample.id for sample in generated] == ["g/0", "g/1"] and scorer.num_unscored == 0
    first = scored[0]
    assert (first.response, first.prompt_tokens, first.response_tokens) == ("<üüüü>", 3, 4)
    assert (first.outcome.reward, first.oldest, first.newest) == (4.0, 0, 0) and scored[1].newest == 1
    assert queue.received == {"text": len("<üüüü><üü>".encode())}
    assert queue.stats()["distqueue/reward/depth"] == 0 == queue.stats()["distqueue/reward/leased"], "acknowledged"


def test_what_cannot_be_scored_meanwhile_waits_until_it_is_asked_for():
    queue, source = MetadataQueue(["reward", "train"]), Source(concurrent=False)
    with Scorer(source, queue) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [4, 2])
        _poll(scorer, (2, 0))
        assert scorer.num_unscored == 2 and not source.scored
        scored, _ = scorer.score_waiting()
        assert [sample.outcome.reward for sample in scored] == [4.0, 2.0] and scorer.num_unscored == 0
        assert scorer.score_waiting() == ([], [])
    assert queue.received.keys() == {"text"}


def test_an_error_of_the_source_is_raised_where_the_controller_polls():
    queue = LocalQueue(["reward", "train"])
    with Scorer(Source(concurrent=True, error=OSError("no such judge")), queue) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [1])
        with pytest.raises(OSError, match="no such judge"):
            _poll(scorer, (1, 1))


def test_the_tokens_of_an_answer_reach_who_reads_them_by_name_and_no_task_and_leave_the_queue():
    queue, source = MetadataQueue(["reward", "train"]), Source(concurrent=False)
    rows = ["eval/1/g"]
    queue.put(pack_answers([_output("g", range(5))], rows))
    assert queue.read(rows, ["prompt", "response"])["response"][0].tolist() == [0, 1, 2, 3, 4]
    for task, columns in (("reward", ["text"]), ("train", ["advantage"])):
        with pytest.raises(TimeoutError):
            queue.get(task, columns, 1, partial=True, timeout_s=0.05)
    answers = {"g": EvalAnswer("g", "two", 5, "stop", rows[0])}
    ((text, outcome),) = Scorer(source, queue).score_answers([PROMPT], answers)
    assert (text, outcome.reward, source.scored[0].id) == ("two", 5.0, rows[0])
    assert queue.stats()["distqueue/ended/dropped:evaluated"] == 1 and queue.stats()["distqueue/rows"] == 0
    with pytest.raises(ValueError, match="dropped:evaluated"):
        queue.put(PackedBatch.from_samples(rows, {"advantage": torch.ones(1)}))
        queue.read(rows, ["advantage"])


class Progress(RuleBasedStateMachine):
    """Every sample is taken once as generated and once as scored, whichever way it is scored."""

    def __init__(self):
        super().__init__()
        self.progress = ScoringProgress()
        self.known, self.to_score, self.generated, self.scored = 0, [], [], []

    @rule(count=st.integers(0, 3), wait=st.booleans())
    def generate(self, count, wait):
        samples = [GeneratedSample(f"s{self.known + k:03}", PROMPT, "", 1, 1) for k in range(count)]
        self.known += count
        self.progress.observe_generated(samples, wait)
        self.to_score += [] if wait else samples

    @rule(count=st.integers(0, 3))
    def score(self, count):
        samples, self.to_score = self.to_score[:count], self.to_score[count:]
        self.progress.observe_scored([sample.scored(RewardOutcome(1.0)) for sample in samples])

    @rule()
    def score_waiting(self):
        self.to_score += self.progress.take_waiting()

    @rule()
    def poll(self):
        generated, scored = self.progress.take_generated(), self.progress.take_scored()
        assert not self.progress.has_news
        for taken in (generated, scored):
            assert [one.id for one in taken] == sorted(one.id for one in taken)
        self.generated += [one.id for one in generated]
        self.scored += [one.id for one in scored]

    @invariant()
    def once(self):
        assert len({*self.generated}) == len(self.generated) and len({*self.scored}) == len(self.scored)
        assert self.progress.num_unscored == self.known - len(self.scored)


Progress.TestCase.settings = settings(max_examples=30, deadline=None)
test_progress = Progress.TestCase


def test_the_thread_ends_with_the_block():
    queue = LocalQueue(["reward", "train"])
    with Scorer(Source(concurrent=True), queue):
        pass
    queue.close()
    assert not any(thread.name == "rewards" and thread.is_alive() for thread in _joined(threading.enumerate()))


def _joined(threads):
    for thread in threads:
        if thread.name == "rewards":
            thread.join(timeout=10)
    return threads
