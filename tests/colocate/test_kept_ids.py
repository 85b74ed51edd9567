"""Truncated sampling is on-policy: engine, trainer and reference compute the same log-probabilities over kept ids."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distqueue import LocalQueue, PackedBatch
from distqueue.hierarchy import Received
from fusion.colocate.samples.sequences import to_sequences
from fusion.inference import Output
from fusion.model import ModelConfig, Parallel, Transformer, load_weights
from fusion.rollout.packing import KEPT, pack_outputs
from fusion.rollout.partial_samples import PartialSamples
from fusion.training import AlgorithmConfig, EmbeddedTrainEngine, TrainingConfig
from fusion.training.algorithms import make_algorithm
from tests.colocate.cards import GROUP, GROUPS, Card, make_spec
from tests.helpers import run_ranks, tiny_checkpoint
from tests.inference.engines import requests, tokens
from tests.inference.test_verification import Guesses
from tests.inference.test_worlds import build
from tests.rollouts import changed, rollout_config

SHAPE = dict(vocab_size=128, initializer_range=0.3)
FILTERS = [
    dict(top_p=0.8),
    dict(top_k=9),
    dict(min_p=0.1),
    dict(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02),
]
COLUMNS = ("prompt", "response", "behaviour_logprobs", "versions", *KEPT)
ROUNDS = 14
OUTPUT = Output("a/0", "a", (1, 2), [5, 6], [-0.1, -0.2], [0, 0])


def broken_rollouts(engine, params, leads) -> PackedBatch:
    """Samples that were generated in chunks and suspended between, each continued from its partial row."""
    queue = LocalQueue(["train"])
    partials, wanted = PartialSamples(queue, kept=True), {one.id: one for one in requests(9, 20, **params)}
    waiting = {id: "" for id in wanted} if leads else {}
    for number in range(ROUNDS):
        if leads and waiting:
            resumed = [replace(wanted[id], earlier=row, chunk_tokens=7) for id, row in waiting.items()]
            engine.submit(partials.restore(resumed))
        outputs = engine.step()
        for _ in range(3 if number % 3 == 1 else 100):
            outputs += engine.step()
        outputs += engine.suspend()
        ended = [one for one in outputs if one.finish_reason not in ("chunk", "abort")]
        suspended = partials.put(ended, [one for one in outputs if one.finish_reason in ("chunk", "abort")])
        waiting = {one.id: one.earlier for one in suspended}
        engine.policy_version += 1
    assert not waiting
    return shared(queue.read(sorted(wanted), COLUMNS) if leads else None)


def shared(value):
    """What rank 0 passes, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def gap_of_rollouts(rank, device, folder, parallel, params):
    """The samples, the largest |Δ log-probability|, the mean mass of the kept ids, and the trainer's metrics."""
    engine = build(device, folder, parallel)
    if rank == 0:
        engine.submit(requests(9, 20, **params))
    truth = shared(tokens(engine.run()))
    engine.scheduler.drafter = Guesses(truth, right=0.7, children=2)
    rows = broken_rollouts(engine, params, leads=rank == 0)
    assert engine.scheduler.counters.drafted_tokens > engine.scheduler.counters.accepted_tokens > 0
    assert shared({id: rows["response"][i].tolist() for i, id in enumerate(rows.ids)}) == truth
    model = Transformer(ModelConfig.from_hf(folder), engine.mesh, device, torch.float32)
    load_weights(model, folder)
    # Every sequence computes its own rows, as in the engine: sharing prefixes rounds otherwise.
    config = TrainingConfig(token_budget=200, share_prefixes="off")
    trainer = EmbeddedTrainEngine(model, model.mesh, device, config, temperature=params.get("temperature", 1.0))
    sequences = to_sequences(Received.of(rows))
    logprobs, _ = trainer.logprobs(sequences)
    whole, _ = trainer.logprobs(replace(sequences, kept_counts=None, kept_ids=None))
    gap = (logprobs - sequences.behaviour_logprobs)[sequences.loss_mask].abs().max()
    mass = (whole - logprobs)[sequences.loss_mask].exp().mean()
    sequences = replace(sequences, advantages=torch.ones(sequences.rows))
    metrics = trainer.forward_backward(sequences, make_algorithm(AlgorithmConfig(), 64).loss)
    return rows, float(gap), float(mass), metrics


LAYOUTS = [Parallel(), Parallel(2, tp=2), Parallel(2, pp=2)]
DEFAULT = [(LAYOUTS[0], FILTERS[1]), (LAYOUTS[1], FILTERS[0]), (LAYOUTS[2], FILTERS[3])]
CASES = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.extended) for case in product(LAYOUTS, FILTERS)
]


@pytest.mark.parametrize(("parallel", "params"), CASES, ids=str)
def test_samples_of_truncated_sampling_are_on_policy(tmp_path, parallel, params):
    """In chunks, with drafts that are verified, suspended and resumed, over new versions."""
    folder = tiny_checkpoint(tmp_path, **SHAPE)
    for rows, gap, mass, metrics in run_ranks(gap_of_rollouts, parallel.world, folder, parallel, params):
        assert gap <= 1e-5
        assert metrics["training/rollout_logprobs_diff_mean"] <= 3e-6
        assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-6)
        counts = rows["kept_counts"].buffer
        assert metrics["training/kept_ids_mean"] == pytest.approx(float(counts.double().mean()))
        assert metrics["training/kept_mass_mean"] == pytest.approx(mass, abs=1e-5) and mass < 0.999
        assert metrics["training/kept_capped_share"] == 0
        assert 1 <= counts.min() <= counts.max() <= params.get("top_k", 128)


def step_of_the_loop(rank, device, spec):
    card = Card(rank, device, spec)
    samples = card.step(0)
    ids = [f"0-{group}/{member}" for group in range(GROUPS) for member in range(GROUP)]
    values = {}
    if rank in spec.deployment.train:
        report = card.worker.train([card.own(ids[:4]), card.own(ids[4:])])
        values = {name: value.value / (value.weight or 1) for name, value in report.metrics.items()}
    return samples["logprobs"], samples["reference"], values


@pytest.mark.parametrize(
    ("npus", "train", "infer", "score_cards"),
    [
        (2, {"tp": 2}, {}, 0),
        (3, {"tp": 2}, {"ep": 2}, 1),
        pytest.param(4, {"tp": 2, "ep": 2, "pp": 2}, {"ep": 2}, 0, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_policy_and_reference_of_a_step_are_renormalised_over_the_kept_ids(tmp_path, npus, train, infer, score_cards):
    spec = make_spec(tiny_checkpoint(tmp_path, **SHAPE), npus, train, infer, score_cards=score_cards)
    spec = replace(
        spec,
        rollout=changed(spec.rollout, top_p=0.7, chunk_tokens=2),
        training=TrainingConfig(lr=0.0),
        algorithm=AlgorithmConfig(kl_coef=0.1, group_size=GROUP, correction="decoupled"),
    )
    results = run_ranks(step_of_the_loop, npus, spec)
    assert any("training/kept_mass_mean" in metrics for *_, metrics in results)
    for behaviour, reference, metrics in results:
        assert torch.allclose(torch.tensor(behaviour), torch.tensor(reference), atol=1e-5)
        if "training/kept_mass_mean" in metrics:
            assert metrics["training/rollout_logprobs_diff_mean"] <= 3e-6 and metrics["actor/kl_loss"] <= 1e-9
            assert 0.7 <= metrics["training/kept_mass_mean"] < 1


def sequences_of(kept_ids):
    ids = np.array([id for ids in kept_ids for id in ids], np.int32).tobytes()
    output = replace(OUTPUT, kept_counts=[len(ids) for ids in kept_ids], kept_ids=ids)
    to_sequences(Received.of(pack_outputs([output])))


def test_a_row_whose_kept_ids_lack_the_token_is_refused():
    sequences_of([[5, 1], [6]])
    sequences_of([[5, 1], []])
    with pytest.raises(ValueError, match="sample 'a/0': kept_ids lacks a sampled token"):
        sequences_of([[5, 1], [7]])


def test_without_filters_no_column_is_put_and_none_is_read():
    assert not rollout_config(temperature=0.0, top_p=0.5).truncates and not rollout_config(temperature=0.7).truncates
    assert rollout_config(min_p=0.1).truncates
    assert not {*KEPT} & pack_outputs([OUTPUT]).columns.keys()
