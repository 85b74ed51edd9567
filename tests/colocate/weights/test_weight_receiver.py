"""New weights reach cards that only generate while their engines go on."""

import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from fusion.colocate import InferenceShare
from fusion.colocate.weights.policy import WeightsDiffer
from fusion.ep_switch import Topology, weights_checksum
from fusion.inference import Request
from tests.colocate.cards import Card, make_spec
from tests.families import family_checkpoint
from tests.helpers import run_ranks, tiny_checkpoint
from tests.machine import patience
from tests.rollouts import changed

X, Y = {"tp": 2, "ep": 2}, {"tp": 1, "ep": 2}
FAR = Topology(1, 2, 2, (8e9, 4e9, 2e9, 1e9))
"""Cards that train and cards that generate are apart: what enters is passed on."""

TOKENS = 400
"""Of a response: it goes on for longer than the weights take to arrive."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def make(path, topology=None, **fusion):
    spec = make_spec(path, 4, X, Y, deployment="separate", **fusion)
    rollout = changed(spec.rollout, max_length=512, max_response_length=TOKENS, max_kv_tokens=8192)
    return replace(spec, ahead=True, rollout=rollout, topology=topology)


def new_weights_arrive(rank, device, spec, versions):
    """Generates without end while policies 1, 2, … come; returns what this card saw of it."""
    card = Card(rank, device, spec)
    worker, share = card.worker, InferenceShare.of(spec.rollout, len(spec.engines))
    worker.switch("infer", 0, share)
    model = worker.card.weights.train or worker.card.weights.infer
    sums, told = [weights_checksum(model)], []
    before = device.memory_by_owner()
    if worker.card.trainer is not None:
        for version in range(1, versions + 1):
            dist.barrier()
            for flat in model.weights.flats:
                flat.mul_(1.25)
            model.weights.card.add_(0.1)
            sums.append(weights_checksum(model))
            worker.switch("infer", version, share, while_generating=True)
        dist.barrier()
        return {"sums": sums, "relays": worker.card.weights.route(share.engines).to_infer.relays}

    def receive():
        for version in range(1, versions + 1):
            dist.barrier()
            worker.receive(version, share)
            told.append(worker.card.receiver.staged.pause_s)
        dist.barrier()
        if worker.card.engine.mesh.rank == 0:
            worker.pause()

    thread = threading.Thread(target=receive)
    thread.start()
    params = replace(spec.rollout.sampling_params(), stop_token_ids=())
    requests = [Request(f"{n}/0", (3 + n, 4, 5), params, group=f"{n}") for n in range(4)]
    report = worker.generate(requests if worker.card.engine.mesh.rank == 0 else [])
    thread.join()
    ended = [span for batch in worker.queue.put_here if "prompt" in batch.columns for span in batch.versions]
    return {
        "sums": [weights_checksum(model)],
        "version": worker.card.engine.policy_version,
        "memory": [before, device.memory_by_owner()],
        "weights": model.weights.nbytes,
        "pauses": told,
        "spans": ended + [one.versions for one in report.suspended if one.versions],
    }


CASES = {
    "host": ({}, None, "emulated"),
    "hbm": ({"double_buffer": True}, None, "emulated"),
    "late copies": ({}, None, "adversarial"),
    "hbm, late copies": ({"double_buffer": True}, None, "adversarial"),
    "passed on": ({}, FAR, "emulated"),
    "passed on in hbm": ({"double_buffer": True}, FAR, "emulated"),
}


DEFAULT = "host", "hbm, late copies", "passed on in hbm"


@pytest.mark.parametrize(
    "case", [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.extended) for case in CASES]
)
def test_an_engine_goes_on_while_its_weights_arrive_and_adopts_them_whole(path, case):
    fusion, topology, kind = CASES[case]
    ranks = run_ranks(new_weights_arrive, 4, make(path, topology, **fusion), 2, device=kind)
    trainers, engines = ranks[:2], ranks[2:]
    for card in engines:
        assert card["version"] == 2 and len(card["pauses"]) == 2 and min(card["pauses"]) > 0
        assert card["sums"] == trainers[0]["sums"][-1:], "what the trainer had last"
        before, after = card["memory"]
        assert before == after and before["kv"] > 0
        buffers = 2 if fusion else 1
        assert buffers * card["weights"] <= before["weights"] < (buffers + 0.5) * card["weights"]
    assert trainers[0]["relays"] == (topology is not None)
    spans = [span for card in engines for span in card["spans"]]
    assert any(oldest < newest for oldest, newest in spans), "samples go on over a change of weights"


@pytest.mark.parametrize(
    "fusion", [{}, pytest.param({"double_buffer": True}, marks=pytest.mark.extended)], ids=["host", "hbm"]
)
def test_correction_biases_arrive_in_float32_and_are_adopted_with_the_weights(tmp_path, fusion):
    spec = make(family_checkpoint(tmp_path, "glm4_moe"), **fusion)
    spec = replace(spec, model=replace(spec.model, dtype="bfloat16"))
    trainers, engines = (ranks := run_ranks(new_weights_arrive, 4, spec, 1))[:2], ranks[2:]
    for card in engines:
        assert card["version"] == 1 and card["sums"] == trainers[0]["sums"][-1:]


def test_an_engine_that_adopts_other_weights_than_were_sent_fails_with_both_of_its_threads(path):
    assert run_ranks(tampered, 4, make(path), device="emulated") == [None, None, True, True]


def tampered(rank, device, spec):
    card = Card(rank, device, spec)
    worker, share = card.worker, InferenceShare.of(spec.rollout, len(spec.engines))
    worker.switch("infer", 0, share)
    if worker.card.trainer is not None:
        worker.switch("infer", 1, share, while_generating=True)
        return None
    receiver, received = worker.card.receiver, []
    to_infer = receiver.switcher.to_infer

    def to_infer_and_tamper(*args, **options):
        to_infer(*args, **options)
        receiver.staged._storage.flats[0][0] += 1

    def receive():
        try:
            received.append(worker.receive(1, share))
        except WeightsDiffer as error:
            received.append(error)

    receiver.switcher.to_infer = to_infer_and_tamper
    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    params = replace(spec.rollout.sampling_params(), stop_token_ids=())
    with pytest.raises(WeightsDiffer, match="policy 1 has checksum") as failed:
        worker.generate([Request("0/0", (3, 4, 5), params, group="0")] if worker.card.engine.mesh.rank == 0 else [])
    thread.join(timeout=patience(30))
    return received == [failed.value]
