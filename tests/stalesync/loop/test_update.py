"""The update step against a real queue, with cards that only read: nothing is trained twice, lost, or read back."""

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distqueue import LocalQueue, PackedBatch, SamplesLost
from fusion.colocate import Worker
from fusion.model import Parallel
from fusion.rewards import RewardOutcome
from fusion.rollout.types import branch_id
from fusion.telemetry import Metrics
from fusion.training.config import ALGORITHMS
from stalesync.cards.stage_calls import RunningStage
from stalesync.loop.reference_stream import ReferenceStream
from stalesync.loop.sample_columns import SampleColumns
from tests.stalesync.loop.update_world import (
    GROUP,
    GROUPS,
    ControllersQueue,
    Killed,
    TrainingCards,
    queue_of,
    run_training,
    run_update,
    scored_groups,
    updater_of,
)


def test_every_scored_sample_is_claimed_written_trained_and_acknowledged_once():
    groups = scored_groups(lost=["g1/0"])
    queue = queue_of(groups)
    seen, cards = ControllersQueue(queue), TrainingCards(queue)
    run_training(updater_of(seen, cards), groups)
    assert sorted(cards.trained) == ["g0/0", "g0/1", "g1/1", "g2/0", "g2/1"]
    assert seen.calls == ["drop", "put", "ack"]
    figures = queue.stats()
    assert figures["distqueue/ended/done"] == 5 and figures["distqueue/ended/dropped:reward_raised"] == 1
    assert figures["distqueue/rows"] == 1, "a sample that the ledger did not name stays as it was"


def test_the_penalty_of_long_responses_counts_what_was_sampled():
    advantages = []
    for observed in (0, 5):
        groups = scored_groups()
        for members in groups.values():
            members[0].response_tokens, members[0].observed_tokens = 3 + observed, observed
        queue, seen = queue_of(groups), []
        put = queue.put
        queue.put = lambda batch, put=put, seen=seen, **options: (seen.append(batch), put(batch, **options))
        run_training(updater_of(queue, TrainingCards(queue), overlong_buffer=4), groups)
        advantages.append(seen[0]["advantage"].buffer.tolist())
    assert advantages[0] == advantages[1] and any(advantages[0])


@pytest.mark.parametrize("trained", [True, False])
def test_the_cards_train_before_they_are_awaited_and_nobody_waits_if_nothing_is_trained(trained):
    class Waiting(TrainingCards):
        waits = 0

        def wait(self, running):
            self.waits += 1
            return super().wait(running)

    groups = scored_groups(
        [] if trained else [f"g{group}/{member}" for group in range(GROUPS) for member in range(GROUP)]
    )
    queue, metrics = queue_of(groups), Metrics()
    cards = Waiting(queue)
    updater = updater_of(queue, cards)
    samples = SampleColumns.of([sample for members in groups.values() for sample in members])
    training = updater.begin(list(groups), samples, 0, metrics)
    assert cards.waits == 0 and len(cards.trained) == len(training.samples) == (GROUPS * GROUP if trained else 0)
    assert not updater.finish(training, metrics) and cards.waits == trained
    assert ("timing_s/train" in metrics.result()) == trained


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("refused", [False, True])
def test_training_begins_behind_a_reference_that_the_same_cards_compute(apart, refused):
    order = []

    class Ordered(TrainingCards):
        def begin_each(self, calls):
            ((stage, ids),) = {(call.stage, str(call.args[0])) for call in calls.values()}
            order.append(f"begin {stage}")
            return (
                super().begin_each(calls)
                if stage == Worker.train.__name__
                else RunningStage(stage, (0,), {"answer": 0})
            )

        def wait(self, running):
            order.append(f"wait {running.stage}")
            return [SimpleNamespace(has_lost=False, reference_kl={})]

    groups = scored_groups(lost=["g1/0"])
    queue = queue_of(groups)
    if refused:
        queue.put(PackedBatch(("g2/1",), {}), claim="train")
    cards = Ordered(queue)
    updater = updater_of(queue, cards)
    updater.spec.algorithm = replace(updater.spec.algorithm, kl_coef=0.1, kl_in="loss")
    updater.spec.reference = Parallel(1) if apart else None
    updater.spec.deployment, updater.spec.ahead = SimpleNamespace(train=(0,), reference=(0,)), True
    updater.reference = ReferenceStream(spec=updater.spec, cards=cards, record_reports=lambda reports: None)
    for members in groups.values():
        updater.reference.observe(members)
    if refused:
        with pytest.raises(ValueError, match="sample 'g2/1'"):
            run_update(updater, groups)
        assert order == ["begin reference"] and not cards.trained
        return
    assert not run_update(updater, groups)
    first = ["wait reference", "begin train"] if apart else ["begin train", "wait reference"]
    assert order == ["begin reference", *first, "wait train"]
    assert sorted(cards.trained) == ["g0/0", "g0/1", "g1/1", "g2/0", "g2/1"]


@pytest.mark.parametrize("update", [True, False])
def test_each_replica_trains_what_it_has_computed_the_reference_of(update):
    """Also a part that is accumulated, which is of no minibatch yet: no replica need wait for another's."""
    ids = {Worker.reference.__name__: {}, Worker.train.__name__: {}}

    class Replicas(TrainingCards):
        def begin_each(self, calls):
            for rank, call in calls.items():
                batches = [call.args[0]] if call.stage == Worker.reference.__name__ else call.args[0]
                ids[call.stage][rank] = [id for batch in batches for id in batch]
            return RunningStage(call.stage, tuple(calls), {})

        def wait(self, running):
            return [SimpleNamespace(has_lost=False, reference_kl={})]

    groups = scored_groups()
    groups["g0"][0].response_tokens = 100  # more than all others: a replica has it alone, but not in minibatches
    queue = queue_of(groups)
    updater = updater_of(queue, Replicas(queue))
    updater.spec.algorithm = replace(updater.spec.algorithm, kl_coef=0.1, kl_in="loss")
    updater.spec.train, updater.spec.ahead = Parallel(2), True
    updater.spec.deployment = SimpleNamespace(train=(0, 1), reference=(0, 1))
    updater.reference = ReferenceStream(spec=updater.spec, cards=updater.cards, record_reports=lambda reports: None)
    run_update(updater, groups, update=update)
    trained = ids[Worker.train.__name__]
    assert {rank: sorted(own) for rank, own in trained.items()} == {
        rank: sorted(own) for rank, own in ids[Worker.reference.__name__].items()
    }
    assert sorted(id for own in trained.values() for id in own) == sorted(
        sample.id for members in groups.values() for sample in members
    )


@pytest.mark.parametrize("minibatches", [2, 3])
@pytest.mark.parametrize("failed", [["g0"], ["g2"], ["g0", "g1"], ["g1", "g2"]])
def test_no_optimizer_step_is_made_without_samples(failed, minibatches):
    groups = scored_groups(lost=[f"{group}/{member}" for group in failed for member in range(GROUP)])
    queue = queue_of(groups)
    cards = TrainingCards(queue)
    updater = updater_of(queue, cards)
    updater.spec.algorithm = replace(updater.spec.algorithm, minibatches=minibatches)
    run_training(updater, groups)
    assert cards.num_samples == [GROUP] * (3 - len(failed)) or (minibatches, cards.num_samples) == (2, [2 * GROUP])


@pytest.mark.parametrize("parts", [[1], [2], [1, 1]])
@pytest.mark.parametrize("failed", [[], ["g0"], ["g1"], ["g0", "g1"], ["g2"], ["g1", "g2"]])
def test_a_step_of_which_a_part_is_accumulated_makes_the_optimizer_steps_of_one_without(parts, failed):
    """Of three groups the first minibatch has two, of which all are accumulated in up to two parts, or one."""
    samples = []
    for accumulated in ([], parts):
        groups = scored_groups(lost=[f"{group}/{member}" for group in failed for member in range(GROUP)])
        names = iter(groups)
        cards = TrainingCards(queue := queue_of(groups))
        updater = updater_of(queue, cards)
        for part in accumulated:
            run_update(updater, {name: groups[name] for name in islice(names, part)}, update=False)
        cards.num_samples, in_parts = [], sum(cards.num_samples)
        run_training(updater, {name: groups[name] for name in names})
        by_step = cards.num_samples
        samples.append([in_parts + by_step[0], *by_step[1:]] if in_parts else by_step)
    assert samples[1] == samples[0], "optimizer steps with as many samples"


def test_samples_whose_reward_failed_are_dropped_in_one_call_per_error():
    groups = scored_groups(lost=["g0/0", "g1/0"])
    groups["g2"][0].outcome = RewardOutcome(None, "timeout")
    queue = queue_of(groups)
    seen, cards = ControllersQueue(queue), TrainingCards(queue)
    run_training(updater_of(seen, cards), groups)
    assert seen.calls == ["drop", "drop", "put", "ack"]
    assert sorted(cards.trained) == ["g0/1", "g1/1", "g2/1"]
    figures = queue.stats()
    assert figures["distqueue/ended/dropped:reward_raised"] == 2
    assert figures["distqueue/ended/dropped:reward_timeout"] == 1


def test_a_sample_that_was_trained_or_is_being_trained_is_refused_by_name_and_trained_by_nobody():
    groups = scored_groups()
    queue = queue_of(groups)
    queue.put(PackedBatch(("g2/1",), {}), claim="train")
    cards = TrainingCards(queue)
    with pytest.raises(ValueError, match="sample 'g2/1': task 'train' has leased it already"):
        run_training(updater_of(queue, cards), groups)
    queue.ack("train", ["g2/1"])
    with pytest.raises(ValueError, match="sample 'g2/1': every task has acknowledged it"):
        run_training(updater_of(queue, cards), groups)
    assert not cards.trained and queue.stats()["distqueue/train/leased"] == 0


@pytest.mark.parametrize("dies_at", [1, "train", 2])
def test_an_update_that_is_killed_at_any_point_leaves_every_sample_untrained_in_the_queue(dies_at):
    groups = scored_groups()
    queue = queue_of(groups)
    seen = ControllersQueue(queue, dies_at)
    with pytest.raises(Killed):
        run_training(updater_of(seen, TrainingCards(queue, dies=dies_at == "train")), groups)
    figures = queue.stats()
    assert figures["distqueue/rows"] == 7 and "distqueue/ended/done" not in figures, "an ack is the last thing done"


class LosingQueue(LocalQueue):
    """Loses a sample when it is claimed with its advantage, or when the cards read it."""

    loses_at: tuple[str, list[str]] = ("", [])

    def put(self, batch, **options):
        if options:
            self._lose("claim")
        return super().put(batch, **options)

    def read(self, ids, columns):
        self._lose("read")
        return super().read(ids, columns)

    def _lose(self, when):
        if self.loses_at[0] == when:
            self.lose(self.loses_at[1], "damaged")


class CarefulCards(TrainingCards):
    """Goes on without what was lost, as a card does."""

    def _train(self, minibatches):
        left = []
        for ids in minibatches:
            try:
                self._queue.read(ids or ["other"], ["response"])
            except SamplesLost as error:
                self.has_lost = True
                ids = [id for id in ids if id not in error.ids]
            left += [ids] if ids else []
        super()._train(left)


@pytest.mark.parametrize("when", ["before", "claim", "read"])
def test_what_is_lost_is_not_trained_and_the_rest_is(when):
    groups = scored_groups()
    queue = queue_of(groups, LosingQueue)
    lost = ["g0/1", "g2/0", "g2/1"]
    if when == "before":
        queue.lose(lost, "damaged")
    queue.loses_at = when, lost
    cards = CarefulCards(queue)
    updater = updater_of(queue, cards)
    assert run_update(updater, groups)
    updater.acknowledge()
    assert sorted(cards.trained) == ["g0/0", "g1/0", "g1/1"]
    figures = queue.stats()
    assert figures["distqueue/ended/done"] == 3 and figures["distqueue/ended/lost:damaged"] == 3
    assert [one.id for one in queue.lost()] == lost


@pytest.mark.parametrize("layout", [Parallel(4, tp=2), Parallel(8, tp=2, pp=2)])
def test_every_card_is_sent_the_samples_of_its_replica_only(layout):
    groups, ranks = scored_groups(), tuple(range(layout.world, 0, -1))
    queue = queue_of(groups)
    updater = updater_of(queue, sent := SentCalls())
    updater.spec.train, updater.spec.deployment = layout, SimpleNamespace(train=ranks)
    run_update(updater, groups)
    by_place = [sent.calls[rank].args[0] for rank in ranks]
    for place, minibatches in enumerate(by_place):
        first_of_replica = layout.coordinate("dp", place) * layout.tp
        assert minibatches == by_place[first_of_replica]
    replicas = [by_place[dp * layout.tp] for dp in range(layout.dp)]
    ids = sorted(id for minibatches in replicas for ids in minibatches for id in ids)
    assert ids == sorted(sample.id for members in groups.values() for sample in members)


@pytest.mark.parametrize("prompt_tokens", [2, 500])
def test_siblings_are_trained_by_one_replica_where_they_share_a_long_prompt(prompt_tokens):
    groups = scored_groups()
    for number, sample in enumerate(one for members in groups.values() for one in members):
        sample.prompt_tokens, sample.response_tokens = prompt_tokens, 3 + number
    updater = updater_of(queue_of(groups), sent := SentCalls())
    updater.spec.train, updater.spec.deployment = Parallel(GROUPS), SimpleNamespace(train=range(GROUPS))
    updater.spec.algorithm.minibatches = 1
    run_update(updater, groups)
    replicas = [{id.split("/")[0] for ids in sent.calls[rank].args[0] for id in ids} for rank in range(GROUPS)]
    assert all(len(found) == 1 for found in replicas) == (prompt_tokens == 500)


class SentCalls:
    def begin_each(self, calls):
        self.calls = calls

    def wait(self, running):
        return []


class NotedQueue(LocalQueue):
    """Notes the columns that are put with a claim."""

    put_last = None

    def put(self, batch, **options):
        self.put_last = batch if options.get("claim") else self.put_last
        return super().put(batch, **options)


def _branched(branches):
    """The scored samples, of which each is in so many branches of 4 tokens."""
    groups = scored_groups()
    for sample, count in zip([one for members in groups.values() for one in members], branches, strict=True):
        sample.row_tokens = (4,) * count if count > 1 else ()
    return groups


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=10, deadline=None)
@given(branches=st.lists(st.integers(1, 4), min_size=GROUPS * GROUP, max_size=GROUPS * GROUP))
def test_every_branch_has_the_advantage_of_its_conversation_and_statistics_count_conversations(name, branches):
    ids = [f"g{group}/{member}" for group in range(GROUPS) for member in range(GROUP)]
    found = []
    for counts in ([1] * len(ids), branches):
        groups = _branched(counts)
        queue = queue_of(groups, NotedQueue)
        cards = TrainingCards(queue)
        run_training(updater_of(queue, cards, turns=True, name=name), groups)
        put = queue.put_last
        rows = [branch_id(id, number) for id, count in zip(ids, counts, strict=True) for number in range(count)]
        assert [*put.ids] == rows and sorted(cards.trained) == sorted(rows), "all branches are claimed and trained"
        assert queue.stats()["distqueue/rows"] == 1, "none is left"
        columns = put["advantage"].buffer.tolist(), put["share"].buffer.tolist()
        found.append(dict(zip(rows, zip(*columns, strict=True), strict=True)))
    alone, several = found
    for id, count in zip(ids, branches, strict=True):
        for number in range(count):
            advantage, share = several[branch_id(id, number)]
            assert advantage == alone[id][0] and share == pytest.approx(1 / count)


def test_a_conversation_of_which_a_branch_is_lost_is_not_trained_and_leaves_no_row():
    groups = _branched([2, 1, 3, 1, 1, 2])
    queue = queue_of(groups)
    queue.lose(["g0/0", "g1/0.1"], "damaged")
    cards = TrainingCards(queue)
    run_training(updater_of(queue, cards, turns=True), groups)
    assert sorted(cards.trained) == ["g0/1", "g1/1", "g2/0", "g2/1", "g2/1.1"]
    assert queue.stats()["distqueue/rows"] == 1


def test_a_conversation_that_cannot_be_scored_is_dropped_with_its_branches():
    groups = _branched([2, 1, 3, 1, 1, 2])
    groups["g1"][0].outcome = RewardOutcome(None, "raised")
    queue = queue_of(groups)
    run_training(updater_of(queue, TrainingCards(queue), turns=True), groups)
    figures = queue.stats()
    assert figures["distqueue/rows"] == 1 and figures["distqueue/ended/dropped:reward_raised"] == 3
