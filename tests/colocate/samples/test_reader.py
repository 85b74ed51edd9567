"""What the cards of a replica ask of the queue, and what comes to each of them."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from distqueue import PackedBatch
from distqueue.hierarchy import Received
from fusion.colocate.samples.sequences import stage_columns, to_sequences
from fusion.model import Mesh, Parallel
from fusion.rollout.packing import SAMPLED, SHARE
from tests.colocate.cards import GROUP, GROUPS, Card, make_spec
from tests.helpers import run_ranks, tiny_checkpoint
from tests.machine import patience

IDS = [f"0-{group}/{member}" for group in range(GROUPS) for member in range(GROUP)]


def one_step(rank, device, spec):
    """A step, then what this card got of its samples and what it asked for, by stage."""
    card = Card(rank, device, spec)
    checksum = card.step(0)["weights"]
    worker, found = card.worker, {}
    for stage, reader in worker.card.reader.readers.items():
        requests, arrives = reader.requests, reader.tree.incoming(reader.rank)
        columns = {name: column.buffer.numel() for name, column in reader.read(IDS).batch.columns.items()}
        found[stage] = requests, columns, sorted(arrives.columns) if arrives else None
    return found, checksum


def test_every_stage_of_a_pipeline_gets_what_it_looks_at_and_one_card_asks(tmp_path):
    spec = make_spec(tiny_checkpoint(tmp_path, num_hidden_layers=3), 3, {"pp": 3}, {"tp": 1, "ep": 1})
    (first, _), (middle, _), (last, _) = run_ranks(one_step, 3, spec)
    for stage in ("reference", "train"):
        assert [found[stage][0] for found in (first, middle, last)] == [1, 0, 0]
        assert first[stage][1].keys() == {"prompt", "response"}
        assert middle[stage][1:] == ({}, []), "no payload, not even to pass on"
    assert last["reference"][1].keys() == {"response"}
    assert last["train"][1].keys() == {"response", "behaviour_logprobs", "advantage", "versions", "ref_logprobs"}
    assert last["train"][2] == sorted(last["train"][1]) and last["train"][1]["response"] > 0


def conversation(rank, device, spec):
    """A step of samples whose second token was not sampled, then what was computed and read."""
    card = Card(rank, device, spec)
    put = card.worker.queue.put

    def put_conversations(batch):
        if "response" in batch.columns:
            sampled = [torch.arange(length) != 1 for length in batch["response"].lengths().tolist()]
            columns = PackedBatch.from_samples(batch.ids, {SAMPLED: sampled}).columns
            batch = replace(batch, columns={**batch.columns, **columns})
        put(batch)

    card.worker.queue.put = put_conversations
    reference = card.step(0)["reference"]
    report = card.worker.train([card.own(IDS)])
    metrics = {name: part.value / (part.weight or 1) for name, part in report.metrics.items()}
    return reference, metrics["actor/kl_loss"], sorted(card.worker.card.reader.readers["train"].read(IDS).batch.columns)


def test_every_stage_of_a_pipeline_reads_which_tokens_were_sampled(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path)
    spec = replace(make_spec(checkpoint, 2, {"pp": 2}, {"tp": 1, "ep": 1}), turns=True)
    (reference, kl, first), (_, last_kl, last) = run_ranks(conversation, 2, spec)
    assert {SAMPLED, SHARE} <= {*first} & {*last} and kl == last_kl
    assert 0.0 in reference and any(reference), "the reference computes nothing at an observation"


def idle_replica(rank, device, spec):
    card = Card(rank, device, spec)
    card.step(0)
    report = card.worker.train([[IDS, []][card.worker.card.meshes.train.dp_rank]])
    return {name: part.value / (part.weight or 1) for name, part in report.metrics.items()}["actor/kl_loss"]


def test_a_replica_without_samples_takes_part(tmp_path):
    left, right = run_ranks(idle_replica, 2, make_spec(tiny_checkpoint(tmp_path), 2, {"ep": 2}, {"tp": 2}))
    assert left == right > 0


def two_minibatches(rank, device, spec):
    """Which of the stage's reads had begun when a minibatch was computed."""
    card = Card(rank, device, spec)
    card.step(0)
    queue, trainer, seen = card.worker.queue, card.worker.card.trainer, []
    read, compute = queue.read, trainer.forward_backward
    begun = [threading.Event(), threading.Event()]

    def counted(ids, columns):
        next(event for event in begun if not event.is_set()).set()
        return read(ids, columns)

    def noted(*args, **options):
        begun[1].wait(patience(10))
        seen.append([event.is_set() for event in begun])
        return compute(*args)

    queue.read, trainer.forward_backward = counted, noted
    card.worker.train([IDS[:4], IDS[4:]])
    return seen


def test_a_minibatch_is_read_while_the_one_before_is_computed(tmp_path):
    (seen,) = run_ranks(two_minibatches, 1, make_spec(tiny_checkpoint(tmp_path), 1, {}, {}))
    assert seen == [[True, True], [True, True]]


def test_what_a_rank_needs():
    loss = ("advantage", "ref_logprobs")
    stages = [stage_columns(Mesh(Parallel(3, pp=3), rank), loss) for rank in range(3)]
    assert stages == [("prompt", "response"), (), ("response", *loss)]
    assert stage_columns(Mesh.single(), loss) == ("prompt", "response", *loss)


def test_a_column_that_does_not_fit_is_refused_by_sample():
    columns = {
        "prompt": [torch.arange(2), torch.arange(1)],
        "response": [torch.arange(3), torch.arange(4)],
        "behaviour_logprobs": [torch.zeros(3), torch.zeros(5)],
    }
    with pytest.raises(ValueError, match="sample 'b': behaviour_logprobs has 5 values for 4 response tokens"):
        to_sequences(Received.of(PackedBatch.from_samples(["a", "b"], columns)))
