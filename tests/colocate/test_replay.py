"""The engine's routing in the trainer: what it is good for, and a step of the loop with it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from distqueue import PackedBatch
from distqueue.hierarchy import Received
from fusion.colocate.samples.sequences import stage_columns, to_sequences
from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.rollout.packing import pack_outputs
from fusion.training import AlgorithmConfig, EmbeddedTrainEngine, TrainingConfig
from fusion.training.algorithms import make_algorithm
from fusion.training.replay import new_record
from tests.colocate.cards import GROUP, GROUPS, Card, make_spec
from tests.families import family_checkpoint
from tests.helpers import run_ranks, tiny_checkpoint
from tests.rollouts import rollout_config

MISMATCH = "training/routing_mismatch"
IDS = [f"0-{group}/{member}" for group in range(GROUPS) for member in range(GROUP)]

SHAPE = dict(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=6,
    num_experts=16,
    num_experts_per_tok=4,
    tie_word_embeddings=False,
    initializer_range=0.1,
)


def generated(device, folder, count=24, max_tokens=24):
    """Outputs of an engine in bf16, and a trainer of the same weights."""
    config = ModelConfig.from_hf(folder)
    models = [Transformer(config, Mesh.single(), device, torch.bfloat16) for _ in range(2)]
    for model in models:
        load_weights(model, folder)
    rollout = rollout_config(max_length=256, max_seqs=24, max_batch_tokens=256, max_kv_tokens=4096)
    engine = EmbeddedEngine(models[0], models[0].mesh, device, rollout, seed=5, routing=True)
    engine.allocate_kv()
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(2, 128) for _ in range(draw.choice((5, 20, 40)))) for _ in range(count // 4)]
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=())
    engine.submit(Request(f"r{i}", prompts[i // 4], params, group=f"g{i // 4}") for i in range(count))
    outputs = engine.run()
    assert engine.status()["prefix_hit_tokens"] > 0
    return outputs, EmbeddedTrainEngine(models[1], models[1].mesh, device, TrainingConfig(lr=1e-3, token_budget=1000))


def gaps(rank, device, folder):
    """Tokens whose experts differ between engine and trainer, and the p99 of |Δ logprob|, each without and with replay;
    and the mismatch that the trainer reports with it."""
    outputs, trainer = generated(device, folder)
    batch = pack_outputs(outputs)
    assert batch["routing"].buffer.dtype is torch.uint8 and batch["routing"].buffer.shape[1:] == (6, 4)
    advantages = {"advantage": torch.linspace(-1, 1, len(batch))}
    columns = PackedBatch(batch.ids, batch.columns | PackedBatch.from_samples(batch.ids, advantages).columns)
    replayed = to_sequences(Received.of(columns))
    known = torch.ones(replayed.rows, dtype=torch.bool)
    known[replayed.last_rows()] = False
    theirs = replayed.routing.sort(-1).values[known]
    differ, p99 = {}, {}
    for name, sequences in {"none": replace(replayed, routing=None), "rollout": replayed}.items():
        went = new_record(sequences, trainer.model)
        logprobs, _ = trainer.logprobs(sequences, went)
        gap = (logprobs - sequences.behaviour_logprobs)[sequences.loss_mask].abs()
        differ[name] = int((went.sort(-1).values[known] != theirs).flatten(1).any(1).sum())
        p99[name] = gap.quantile(0.99).item()
    metrics = trainer.forward_backward(replayed, make_algorithm(AlgorithmConfig(), 64).loss)
    return differ, p99, metrics[MISMATCH]


def test_replay_takes_the_jumps_out_of_the_logprobs_in_bf16(tmp_path):
    ((differ, p99, mismatch),) = run_ranks(gaps, 1, tiny_checkpoint(tmp_path, **SHAPE), timeout_s=300)
    assert differ["none"] > 0 and differ["rollout"] == 0
    assert p99["rollout"] <= p99["none"] / 2
    assert 0 < mismatch < 0.1


def two_minibatches(rank, device, spec):
    """A step of the loop and its samples once more in two minibatches: the mismatch of these, and what was read."""
    card = Card(rank, device, spec)
    card.step(0)
    worker = card.worker
    report = worker.train([card.own(IDS[:4]), card.own(IDS[4:])])
    mismatch = report.metrics.get(MISMATCH)
    return mismatch and mismatch.value / (mismatch.weight or 1), worker.card.reader.readers["train"].columns


LAYOUTS = {
    "PP2-to-EP2": (4, {"tp": 2, "ep": 2, "pp": 2}, {"tp": 1, "ep": 2}),
    "EP2-to-PP2": (2, {"ep": 2}, {"pp": 2}),
    "DP4EP2-to-EP4": (4, {"ep": 2}, {"ep": 4}),  # no other group has the members of an EP group
}
DEFAULT = [("train", "EP2-to-PP2"), ("rollout", "PP2-to-EP2"), ("rollout", "DP4EP2-to-EP4")]


@pytest.mark.parametrize(
    ("replay", "npus", "train", "infer"),
    [
        pytest.param(
            replay, *case, id=f"{replay}-{name}", marks=() if (replay, name) in DEFAULT else pytest.mark.extended
        )
        for replay in ("none", "train", "rollout")
        for name, case in LAYOUTS.items()
    ],
)
def test_a_step_in_layouts_that_differ(tmp_path, npus, train, infer, replay):
    """In float32 policies that are equal route alike, so what strays was brought to the wrong token or layer. The
    weights stay (lr 0), or move so far that the routing follows."""
    path = tiny_checkpoint(tmp_path, num_hidden_layers=3)
    for lr in (0.0, 5e-3):
        algorithm = AlgorithmConfig(kl_coef=0.1, group_size=GROUP, replay=replay)
        spec = make_spec(path, npus, train, infer)
        spec = replace(spec, algorithm=algorithm, training=TrainingConfig(lr=lr))
        results = run_ranks(two_minibatches, npus, spec)
        mismatches = {mismatch for mismatch, _ in results}
        assert len(mismatches) == 1, "the same on every rank"
        for rank, (_, columns) in enumerate(results):
            assert ("routing" in columns) == (replay == "rollout"), f"stage of rank {rank}"
        (mismatch,) = mismatches
        if replay == "none":
            assert mismatch is None
        else:
            assert (mismatch == 0) == (lr == 0) and mismatch < 0.9


def test_routing_comes_to_the_sparse_layers_of_stages_that_also_have_dense_ones(tmp_path):
    npus, train, infer = LAYOUTS["PP2-to-EP2"]
    spec = make_spec(family_checkpoint(tmp_path, "glm4_moe"), npus, train, infer)
    algorithm = AlgorithmConfig(kl_coef=0.1, group_size=GROUP, replay="rollout")
    results = run_ranks(two_minibatches, npus, replace(spec, algorithm=algorithm, training=TrainingConfig(lr=0.0)))
    assert {mismatch for mismatch, _ in results} == {0.0}


def test_every_stage_looks_at_the_routing_and_gets_its_layers():
    stages = [stage_columns(Mesh(Parallel(3, pp=3), rank), ("advantage",), ("routing",)) for rank in range(3)]
    assert stages == [("prompt", "response", "routing"), ("routing",), ("response", "advantage", "routing")]
    routing = torch.arange(5 * 4 * 2, dtype=torch.uint8).view(5, 4, 2)
    columns = {
        "prompt": [torch.tensor([3, 4]), torch.tensor([5])],
        "response": [torch.tensor([6, 7]), torch.tensor([8, 9])],
        "routing": [routing[:3], routing[3:]],
    }
    delivery = Received.of(PackedBatch.from_samples(["a", "b"], columns))
    found = to_sequences(delivery, range(1, 3)).routing
    assert torch.equal(found[[0, 1, 2, 4, 5]], routing[:, 1:3])
    columns["routing"][1] = routing[4:]
    with pytest.raises(ValueError, match="sample 'b': routing has 1 rows; expected one less than 3 tokens"):
        to_sequences(Received.of(PackedBatch.from_samples(["a", "b"], columns)))
