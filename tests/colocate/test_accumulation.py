"""A sum of gradients that no step has used yet outlives phases in which the card generates."""

import pytest
import torch

from distqueue.hierarchy import Received
from fusion.colocate.samples.sequences import LOSS, REFERENCE, TOKENS, to_sequences
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
        ("all", "switch"),
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
