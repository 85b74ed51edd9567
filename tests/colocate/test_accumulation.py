"""A sum of gradients that no step has used yet outlives phases in which the card generates."""

import pytest
import torch

from distqueue.hierarchy import Received
from fusion.colocate.samples.sequences import LOSS, REFERENCE, TOKENS, response_column, to_sequences
from tests.colocate.cards import GROUP, GROUPS, Card, make_spec
from tests.helpers import run_ranks, tiny_checkpoint

IDS = [f"0-{group}/{member}" for group in range(GROUPS) for member in range(GROUP)]


def two_batches_one_step(rank, device, spec, interruptions):
    """Weights and optimizer after a step of which the first half of the gradient was summed before other phases."""
    card = Card(rank, device, spec)
    card.step(0)
    worker, mine = card.worker, card.own(IDS)
    trainer = worker.card.trainer
    batch = worker.queue.read(mine, (*TOKENS, *LOSS, REFERENCE))
    trainer.forward_backward(to_sequences(Received.of(batch)), worker.card.algorithm.loss)
    held = []
    for _ in range(interruptions):
        worker.switch("infer", 1)
        held.append(worker.card.device.memory_by_owner()["gradients"])
        worker.switch("train")
    worker.train([mine])
    worker.card.switcher.load_optimizer()
    worker.card.switcher.await_optimizer()
    return held, {name: tensor.cpu() for name, tensor in trainer.state_dict()["tensors"].items()}


@pytest.mark.parametrize(
    ("resident", "offload"),
    [
        ("one", "stream"),
        pytest.param("all", "switch", marks=pytest.mark.extended),
        pytest.param("one", "switch", marks=pytest.mark.extended),
        pytest.param("all", "stream", marks=pytest.mark.extended),
    ],
)
def test_an_accumulation_that_a_switch_interrupts_steps_bitwise_as_one_that_none_did(tmp_path, offload, resident):
    """``resident``: training's own come back with the switch, or once the reference has left."""
    spec = make_spec(
        tiny_checkpoint(tmp_path), 2, {"ep": 2}, {"tp": 2}, offload=offload, deployment="full", resident=resident
    )
    straight = run_ranks(two_batches_one_step, 2, spec, 0)
    twice = run_ranks(two_batches_one_step, 2, spec, 2, device="adversarial")
    for (_, expected), (held, found) in zip(straight, twice, strict=True):
        assert held == [0, 0], "the card generates without them"
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def one_batch_in_parts(rank, device, spec, parts):
    """First moments after a step whose batch was trained in parts, between which the card generated."""
    card = Card(rank, device, spec)
    card.step(0)
    worker = card.worker
    for number, ids in enumerate(parts):
        last = number + 1 == len(parts)
        report = worker.train([card.own(ids)], update=last)
        assert ("actor/grad_norm" in report.metrics) == ("actor/loss" in report.metrics) == last
        assert worker.card.trainer.accumulating == (not last)
        if not last:
            worker.switch("infer", 1)
            worker.switch("train")
    worker.card.switcher.load_optimizer()
    worker.card.switcher.await_optimizer()
    tensors = worker.card.trainer.state_dict()["tensors"]
    return {name: tensor.cpu() for name, tensor in tensors.items() if name.startswith("exp_avg.")}


@pytest.mark.parametrize("offload", ["switch", pytest.param("stream", marks=pytest.mark.extended)])
def test_a_batch_that_is_accumulated_in_parts_steps_as_the_whole_batch(tmp_path, offload):
    path = tiny_checkpoint(tmp_path, router_aux_loss_coef=0.0)
    spec = make_spec(path, 2, {"ep": 2}, {"tp": 2}, offload=offload)
    whole = run_ranks(one_batch_in_parts, 2, spec, [IDS])
    parted = run_ranks(one_batch_in_parts, 2, spec, [IDS[:GROUP], IDS[GROUP:]], device="adversarial")
    for expected, found in zip(whole, parted, strict=True):
        assert found.keys() == expected.keys() and found
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5 * float(tensor.abs().max()), rtol=1e-3)


def reference_between_parts(rank, device, spec):
    """Memory of a card by owner while it trains and while its reference computes between two parts of a batch, and the
    reference's log-probabilities then and before."""
    card = Card(rank, device, spec)
    card.step(0)
    worker, mine = card.worker, card.own(IDS)
    roles, trainer = worker.card.roles, worker.card.trainer
    received = Received.of(worker.queue.read(mine, (*TOKENS, REFERENCE)))
    worker.train([mine], update=False)
    trains = worker.card.device.memory_by_owner()
    weights = card.checksum()
    with roles.reference_in_hbm(trainer):
        computes = worker.card.device.memory_by_owner()
        found = roles.logprobs(sequences := to_sequences(received), trainer)
    assert card.checksum() == weights, "the policy is back"
    worker.train([mine])
    return trains, computes, response_column(found, sequences, received).buffer, received.batch[REFERENCE].buffer


def test_the_reference_computes_between_parts_without_more_memory_than_training_has(tmp_path):
    spec = make_spec(tiny_checkpoint(tmp_path), 2, {"ep": 2}, {"tp": 2})
    for trains, computes, found, before in run_ranks(reference_between_parts, 2, spec, device="adversarial"):
        assert torch.equal(found, before) and trains["gradients"] > 0
        assert computes["weights"] == trains["weights"] and computes["gradients"] == trains["gradients"]
