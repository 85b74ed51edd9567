"""From finished samples to rewards: the controller sees text and lengths, every sample is scored once, and answers to
held-out prompts reach nobody else."""

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from distqueue import LocalQueue, PackedBatch
from fusion.environments import Stepped
from fusion.inference import Output
from fusion.rewards import RewardOutcome
from fusion.rollout import EvalAnswer
from fusion.rollout.packing import SAMPLED_TOKENS, pack_answers, pack_outputs
from fusion.telemetry import Metrics
from stalesync.loop.sample_columns import SampleColumns
from stalesync.loop.step_metrics import add_sample_metrics
from stalesync.policy.conversations import Conversations, ConversationSpec
from stalesync.prompts import Prompt
from stalesync.scoring.progress import MIN_GROUPS_KEPT, Arrivals
from stalesync.scoring.samples import Sample
from stalesync.scoring.scoring import Scorer
from stalesync.scoring.sources import EnvironmentReward
from tests.machine import patience
from tests.stalesync.fake_cluster import with_outcome

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
    return Output(
        id, "g", PROMPT.ids, list(tokens), [-1.0] * count, [version] * count, "length" if count == 4 else "stop"
    )


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
    assert [one.cut for one in scored] == [True, False]
    assert queue.received == {"text": len("<üüüü><üü>".encode()), "cut": 2}
    assert queue.stats()["distqueue/reward/depth"] == 0 == queue.stats()["distqueue/reward/leased"], "acknowledged"


def test_the_observed_tokens_of_a_conversation_are_counted_and_kept_by_a_checkpoint():
    queue = MetadataQueue(["reward", "train"])
    with Scorer(Source(concurrent=True), queue, turns=True) as scorer:
        scorer.prompts["g"] = PROMPT
        sampled = {SAMPLED_TOKENS: torch.tensor([3, 2])}
        batch = pack_outputs([_output("g/0", range(4)), _output("g/1", range(2))], ["a", "b"])
        queue.put(replace(batch, columns={**batch.columns, **PackedBatch.from_samples(batch.ids, sampled).columns}))
        _, scored = _poll(scorer, (2, 2))
    assert [(one.response_tokens, one.sampled_tokens) for one in scored] == [(4, 3), (2, 2)]
    restored = [Sample.restore(PROMPT, one.state_dict()) for one in scored]
    assert restored == scored and ["observed_tokens" in one.state_dict() for one in scored] == [True, False]
    metrics = Metrics()
    add_sample_metrics(metrics, SampleColumns.of(scored), by_group=True)
    found = metrics.result()
    assert (found["response_length/mean"], found["observation_length/mean"]) == (2.5, 0.5)


def test_a_conversation_in_branches_is_one_sample_with_all_that_was_said_and_sampled():
    conversations = Conversations(ConversationSpec(9, 99, episode_timeout_s=9.0, retries=0))
    conversations.admit("g", ["g/0"], "d")
    conversations.observe_turn("g/0", 5, "one", span=(1, 2))
    turn = SimpleNamespace(messages=[{"role": "user", "content": "two"}], done=False, reward=None)
    conversations.observe_stepped(Stepped("g/0", turn), None, prompt=[1] * 7, first_prompt_tokens=3)
    queue, source = MetadataQueue(["reward", "train"]), Source(concurrent=True)
    with Scorer(source, queue, turns=True, conversation=conversations.of) as scorer:
        scorer.prompts["g"] = PROMPT
        batch = pack_outputs([_output("g/0.1", range(4), version=3)], ["three"])
        sampled = PackedBatch.from_samples(batch.ids, {SAMPLED_TOKENS: torch.tensor([4])}).columns
        queue.put(replace(batch, columns={**batch.columns, **sampled}))
        _, (sample,) = _poll(scorer, (1, 1))
    assert (sample.id, sample.rows, sample.row_tokens) == ("g/0", ["g/0", "g/0.1"], (8, 11))
    assert (sample.response, sample.response_tokens, sample.sampled_tokens) == ("one\ntwo\nthree", 9, 9)
    assert (sample.oldest, sample.newest, sample.tokens) == (1, 3, 19)
    assert queue.stats()["distqueue/reward/leased"] == 0, "its last row is acknowledged"
    restored = Sample.restore(PROMPT, json.loads(json.dumps(sample.state_dict())))
    assert restored.rows == sample.rows and restored.tokens == 19
    alone = with_outcome(Sample("g/1", PROMPT, "", 3, 2), RewardOutcome(1.0))
    columns = SampleColumns.of([sample, alone])
    assert columns.rows == ["g/0", "g/0.1", "g/1"] and columns.row_tokens == [8, 11, 5] and columns.tokens == [19, 5]


def test_a_lost_sample_whose_group_has_ended_meanwhile_is_skipped():
    queue, source = LocalQueue(["reward", "train"]), Source(concurrent=True)
    queue.put(pack_outputs([replace(_output("ended/0", range(3)), group="ended")], ["lost"]))
    _put(queue, [4, 2])
    scorer = Scorer(source, queue)
    scorer.prompts["g"] = PROMPT
    with scorer:
        generated, scored = _poll(scorer, (2, 2))
    assert [sample.id for sample in generated] == ["g/0", "g/1"] == [sample.id for sample in scored]


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_sample_that_is_delivered_again_is_scored_once(concurrent):
    """As after a restart of the queue's actor, which remembers no leases: here they expire."""

    class Forgetful(LocalQueue):
        def ack(self, task, ids):
            """Leaves the samples leased, until their leases expire."""

        def num_redelivered(self):
            return self.stats()["distqueue/reward/redelivered"]

    queue, source = Forgetful(["reward", "train"], lease_s=0.1), Source(concurrent)
    with Scorer(source, queue) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [4, 2])
        generated, scored = _poll(scorer, (2, 2 if concurrent else 0))
        until_s = time.monotonic() + patience(30)
        while queue.num_redelivered() < 4 and time.monotonic() < until_s:
            time.sleep(0.02)
        assert queue.num_redelivered() >= 4 and scorer.poll(0.2) == ([], [])
        scored += [] if concurrent else scorer.score_waiting()[0]
        assert scorer.poll(0.2) == ([], [])
    assert [one.id for one in generated] == ["g/0", "g/1"] == [one.id for one in scored] and len(source.scored) == 2


def test_arrivals_of_groups_that_have_ended_are_forgotten():
    in_progress = set()
    arrivals = Arrivals(in_progress)
    for number in range(20 * MIN_GROUPS_KEPT):
        group, ids = f"g{number}", [f"g{number}/{k}" for k in range(3)]
        in_progress.add(group)
        assert list(arrivals.new(ids[:2], [group] * 2)) == [0, 1]
        assert list(arrivals.new(ids, [group] * 3)) == [2] and list(arrivals.new(ids, [group] * 3)) == []
        if number % 100:
            in_progress.remove(group)
        assert len(arrivals._samples) <= MIN_GROUPS_KEPT
    assert not any(arrivals.new([f"{group}/1"], [group]) for group in in_progress)


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
    assert queue.received.keys() == {"text", "cut"}


def test_samples_are_reported_before_they_are_acknowledged_which_can_be_awaited():
    asked, leave = threading.Event(), threading.Event()

    class SlowQueue(LocalQueue):
        def ack(self, task, ids):
            asked.set()
            assert leave.wait(patience(60))
            super().ack(task, ids)

    queue = SlowQueue(["reward", "train"])
    with Scorer(Source(concurrent=True), queue) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [4, 2])
        _poll(scorer, (2, 2))
        assert asked.wait(patience(10)) and queue.stats()["distqueue/reward/leased"] == 2
        threading.Timer(0.1, leave.set).start()
        scorer.wait_acknowledged()
        assert queue.stats()["distqueue/reward/leased"] == 0 == queue.stats()["distqueue/reward/depth"]


def test_an_error_of_the_source_is_raised_where_the_controller_polls():
    queue = LocalQueue(["reward", "train"])
    with Scorer(Source(concurrent=True, error=OSError("no such judge")), queue) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [1])
        with pytest.raises(OSError, match="no such judge"):
            _poll(scorer, (1, 1))


def test_after_its_block_the_scorer_scores_nothing():
    entered = threading.Event()

    class Slow(Source):
        def __call__(self, samples):
            entered.set()
            time.sleep(0.3)
            return super().__call__(samples)

    queue, source = LocalQueue(["reward", "train"]), Slow(concurrent=True)
    with Scorer(source, queue) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [1])
        assert entered.wait(patience(10))
    assert [sample.id for sample in source.scored] == ["g/0"], "what was being scored is awaited"
    with Scorer(source, queue) as scorer:
        scorer.prompts["g"] = PROMPT
        time.sleep(0.1)  # so that it waits in the queue
    queue.put(pack_outputs([_output("g/1", range(3))], ["late"]))
    scorer._thread.join(patience(10))
    assert not scorer._thread.is_alive() and len(source.scored) == 1


def test_a_source_that_does_not_return_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr("stalesync.scoring.scoring.MAX_STOP_S", 0.05)
    entered, leave = threading.Event(), threading.Event()

    class Stuck(Source):
        def __call__(self, samples):
            entered.set()
            leave.wait(patience(60))
            return super().__call__(samples)

    queue = LocalQueue(["reward", "train"])
    with Scorer(Stuck(concurrent=True), queue) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [1])
        assert entered.wait(patience(10))
    assert scorer._thread.is_alive()
    leave.set()


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


def test_answers_to_one_prompt_are_a_group():
    source = Source(concurrent=True)
    prompts = [replace(PROMPT, id=f"{name}{number}") for name in "pq" for number in ("", "/1", "/2")]
    answers = {prompt.id: EvalAnswer(prompt.id, f"to {prompt.id}", 1, "stop") for prompt in prompts}
    Scorer(source, LocalQueue(["reward"])).score_answers(prompts, answers, group_size=3)
    assert source.scored[4].others == ["to q", "to q/2"] and source.scored[0].others == ["to p/1", "to p/2"]


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_source_that_compares_gets_whole_groups_and_a_sample_that_waits_holds_up_nothing_else(concurrent):
    queue, source = MetadataQueue(["reward", "train"]), Source(concurrent)
    with Scorer(source, queue, group_size=3) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [4, 2])
        _poll(scorer, (2, 0))
        scorer.wait_acknowledged()
        assert scorer.num_unscored == 0 and not source.scored and scorer.score_waiting() == ([], [])
        assert queue.stats()["distqueue/reward/depth"] == 0 == queue.stats()["distqueue/reward/leased"]
        queue.put(pack_outputs([_output("g/2", range(1), version=2)], ["<ü>"]))
        _poll(scorer, (1, 3 if concurrent else 0))
        scored = source.scored if concurrent else scorer.score_waiting()[0]
    assert [sample.id for sample in scored] == ["g/0", "g/1", "g/2"] and scorer.num_unscored == 0
    assert scored[1].others == ["<üüüü>", "<ü>"] and scored[2].others == ["<üüüü>", "<üü>"]


@pytest.mark.parametrize("concurrent", [True, False])
def test_no_sample_waits_for_one_that_was_lost(concurrent):
    queue, source = LocalQueue(["reward", "train"]), Source(concurrent)
    with Scorer(source, queue, group_size=3) as scorer:
        scorer.prompts["g"] = PROMPT
        _put(queue, [4, 2])
        _poll(scorer, (2, 0))
        scorer.note_lost([Sample("g/2", PROMPT, "", 3, 1)])
        assert scorer.num_unscored == 2
        scored = _poll(scorer, (0, 2))[1] if concurrent else scorer.score_waiting()[0]
        assert [sample.others for sample in scored] == [["<üü>"], ["<üüüü>"]]


@pytest.mark.parametrize("compares", [True, False])
def test_samples_that_wait_for_others_are_saved_and_restored(compares):
    """Into a scorer whose source compares, too, and into one whose source does not any more."""
    queue, source = LocalQueue(["reward", "train"]), Source(concurrent=True)
    with Scorer(source, queue, group_size=3) as scorer:
        scorer.prompts["g"] = PROMPT
        assert scorer.state_dict() == {}
        _put(queue, [4, 2])
        _poll(scorer, (2, 0))
        state = json.loads(json.dumps(scorer.state_dict()))
    queue = LocalQueue(["reward", "train"])  # as restored; the first scorer may still read the other one
    _put(queue, [4, 2])
    queue.ack("reward", queue.get("reward", ["text"], 2, timeout_s=patience(5)).ids)
    again = Scorer(source, queue, group_size=3 if compares else None)
    again.prompts["g"] = PROMPT
    again.load_state_dict(state, {})
    with again:
        if compares:
            queue.put(pack_outputs([_output("g/2", range(1), version=2)], ["<ü>"]))
        _, scored = _poll(again, (1, 3) if compares else (0, 2))
    assert [sample.id for sample in scored] == ["g/0", "g/1", "g/2"][: len(scored)]
    assert (scored[1].response, scored[1].response_tokens, scored[1].newest) == ("<üü>", 2, 1)
    assert scored[0].others == (["<üü>", "<ü>"] if compares else ())


def test_samples_scored_before_a_reward_compared_are_not_waited_for():
    queue, source = LocalQueue(["reward", "train"]), Source(concurrent=True)
    earlier = with_outcome(Sample("g/0", PROMPT, "first", 3, 1), RewardOutcome(1.0))
    lost = with_outcome(Sample("g/1", PROMPT, "", 3, 1), RewardOutcome(None, "lost"))
    scorer = Scorer(source, queue, group_size=3)
    scorer.prompts["g"] = PROMPT
    scorer.load_state_dict({}, {"g": [earlier, lost]})
    with scorer:
        queue.put(pack_outputs([_output("g/2", range(1))], ["<ü>"]))
        _, (sample,) = _poll(scorer, (1, 1))
    assert sample.others == ["first"]


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


def test_the_rewards_of_a_conversation_whose_sum_is_beyond_float32_are_none():
    rewards = {"a": -2.0, "b": 6e38, "c": float("-inf")}
    samples = [Sample(id, PROMPT, "", 3, 1) for id in rewards]
    a, *others = EnvironmentReward(rewards.__getitem__)(samples)
    assert a == RewardOutcome(-2.0)
    assert [(one.reward, one.error) for one in others] == [(None, "bad_type")] * 2
