"""What fails on one card of two fails on both, with the same words, and keeps nobody waiting."""

import re
from dataclasses import replace

import pytest
import torch

from fusion.colocate import Phase, PhaseError
from fusion.model.options import PolicyModelConfig
from fusion.npu import AbortedOnAllRanks, OutOfMemory
from tests.colocate.cards import Card, make_spec, tiny_reward_model
from tests.helpers import run_ranks, tiny_checkpoint

X, Y = {"tp": 2, "ep": 2}, {"tp": 1, "ep": 2}
IDS = [f"0-{group}/{member}" for group in range(4) for member in range(2)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("failures") / "policy")


def outcome(card, work):
    """(the failures of all cards, what this card says, the phase it is left in)"""
    try:
        work()
    except (AbortedOnAllRanks, OutOfMemory) as error:
        aborted = error.__cause__ if isinstance(error, OutOfMemory) else error
        return [str(failure) for failure in aborted.failures], str(error), card.worker.phases.phase.value
    raise AssertionError("nothing failed")


def hog(worker, leave):
    """Takes all of the card but so many bytes, for as long as the result lives."""
    device = worker.card.device
    return torch.empty(device.memory().free - leave, dtype=torch.uint8, device=device.torch_device)


def to_a_phase_that_one_cannot_reach(rank, device, spec, target):
    card = Card(rank, device, spec)
    worker = card.worker
    if target == "train":
        worker.switch("infer", 0)
    if rank == 1:
        worker.phases.arrive(Phase.BROKEN)
    work = {
        "infer": lambda: worker.switch("infer", 0),
        "train": lambda: worker.switch("train"),
        "reference": lambda: worker.reference(IDS),
    }
    return outcome(card, work[target])


@pytest.mark.parametrize(("target", "home"), [("infer", "train"), ("train", "infer"), ("reference", "train")])
def test_where_one_card_cannot_go_none_goes(policy, target, home):
    first, second = run_ranks(to_a_phase_that_one_cannot_reach, 2, make_spec(policy, 2, X, Y), target)
    assert first[:2] == second[:2]
    refusal = f"rank 1 (actor_train, actor_generation, reference) cannot switch from broken to {target}; allowed: none"
    assert f"rank 1 failed in phase: PhaseError: {refusal}" in first[1]
    assert (first[2], second[2]) == (home, "broken"), "who was fit stays where it was"


def without_a_master(rank, device, spec):
    card = Card(rank, device, spec)
    worker = card.worker
    worker.switch("infer", 0)
    if rank == 1:  # what the way back would read from the host has left it
        worker.card.switcher.offloader.back([name for name in worker.card.switcher.optimizer if "master" in name])
    return outcome(card, lambda: worker.switch("train"))


def test_a_master_that_one_card_cannot_fetch_breaks_the_switch_on_both(policy):
    spec = replace(make_spec(policy, 2, {"ep": 2}, {"tp": 2, "etp": 2}), model=PolicyModelConfig(policy, "bfloat16"))
    first, second = run_ranks(without_a_master, 2, spec)
    assert first == second and first[2] == "broken"
    assert "rank 1 failed in masters: AssertionError: master." in first[1] and "is not on the host" in first[1]


def without_room_for_a_role(rank, device, spec, stage):
    card = Card(rank, device, spec)
    worker = card.worker
    worker.switch("infer", 0)
    worker.switch("train")
    taken = hog(worker, 1 << 10) if rank == 1 else None
    try:
        found = outcome(card, lambda: getattr(worker, stage)([IDS]))
    finally:
        del taken
    with pytest.raises(PhaseError, match="cannot train in phase broken"):
        worker.train([IDS])
    return found


@pytest.mark.parametrize(
    ("stage", "phase", "fusion"),
    [
        pytest.param("reference", "reference", {}, marks=pytest.mark.extended),
        ("score", "reward", {"deployment": "full", "resident": "one"}),
    ],
)
def test_a_role_that_does_not_fit_one_card_comes_to_none(policy, tmp_path, stage, phase, fusion):
    larger = tiny_reward_model(tmp_path, hidden_size=128)
    first, second = run_ranks(
        without_room_for_a_role, 2, make_spec(policy, 2, X, Y, larger, **fusion), stage, device="adversarial"
    )
    assert first[0] == second[0] and first[0][0].startswith(f"rank 1 failed in to {phase}: OutOfMemoryError: ")
    assert first[1].startswith("aborted on all cards: rank 1 failed in")
    assert second[1].startswith(f"rank 1 is out of memory in stage '{stage}', to {phase}; HBM by owner: weights ")
    assert first[2] == second[2] == "broken"


def without_room_for_the_target(rank, device, spec):
    card = Card(rank, device, spec)
    worker = card.worker
    worker.switch("infer", 0)
    worker.switch("train")
    plan = worker.card.switcher.route.to_infer
    room = sum(plan.wire_bytes(rank)) + (plan.peak_bytes(rank) - plan.source.nbytes(rank)) // 4
    taken = hog(worker, room) if rank == 1 else None
    try:
        found = outcome(card, lambda: worker.switch("infer", 1))
    finally:
        del taken
    with pytest.raises(PhaseError, match="cannot generate in phase broken"):
        worker.generate([])
    return found


@pytest.mark.parametrize("device", ["emulated", "adversarial"])
def test_a_switch_whose_target_does_not_fit_one_card_says_where_and_who_held_the_memory(policy, device):
    spec = make_spec(policy, 2, X, Y)
    spec = replace(spec, fusion=replace(spec.fusion, checksum=False))
    first, second = run_ranks(without_room_for_the_target, 2, spec, device=device)
    assert first[0] == second[0] and len(first[0]) == 1 and first[2] == second[2] == "broken"
    held = r"HBM by owner: weights 0.1 MiB, activations \d{4}"
    where = r"rank 1 failed in round \d+ at (layers|embed)\S*: OutOfMemoryError: .*; " + held
    assert first[1].startswith("weight switch aborted on all cards: rank 1") and re.search(where, first[1]), first[1]
    where = r"rank 1 is out of memory in stage 'switch to infer', round \d+ at (layers|embed)\S*; " + held
    assert re.match(where, second[1]), f"what was held then, not what is left now: {second[1]}"


def without_room_for_training(rank, device, spec, stage):
    card = Card(rank, device, spec)
    worker = card.worker
    worker.switch("infer", 0)
    worker.switch("train")
    taken = hog(worker, 1 << 10) if rank == 1 else None
    work = {
        "train": lambda: worker.train([IDS]),
        "restore": lambda: worker.restore("unused"),
    }
    try:
        return outcome(card, work[stage])
    finally:
        del taken


@pytest.mark.parametrize(
    ("stage", "offload", "what"),
    [
        ("train", "switch", "optimizer"),
        ("train", "none", "gradients"),
        ("restore", "switch", "optimizer"),
    ],
)
def test_what_training_needs_comes_to_no_card_if_it_does_not_fit_one(policy, stage, offload, what):
    spec = make_spec(policy, 2, X, Y, offload=offload)
    first, second = run_ranks(without_room_for_training, 2, spec, stage)
    assert first[0] == second[0] and first[0][0].startswith(f"rank 1 failed in {what}: OutOfMemoryError: ")
    assert second[1].startswith(f"rank 1 is out of memory in stage '{stage}', {what}; HBM by owner: weights ")
    assert first[2] == second[2] == "train", "nothing was lost: it can be asked for again"
