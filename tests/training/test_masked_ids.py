"""Ids without a token: what the trainer computes of a model that has more rows than its tokenizer has tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.training import AlgorithmConfig, EmbeddedTrainEngine, Sequences, TrainingConfig
from fusion.training.algorithms import make_algorithm
from tests.helpers import run_ranks, tiny_checkpoint
from tests.pairwise import thinned
from tests.rollouts import rollout_config
from tests.training.ranks import LONGEST, sample_batch, with_policy
from tests.training.sequences import sequences_of

ROWS = 64
"""Of the vocabulary; `sample_batch` has ids below 32"""
HOLES = ((40, 41), (44, 47), (50, 64))
UPPER_HALF = ((32, 64),)
"""All ids of the second of two TP ranks"""
MASKS = {"holes": HOLES, "a whole shard": UPPER_HALF, "none": ()}
TEMPERATURE = 0.7
LAYOUTS = {"TP1": Parallel(), "TP2": Parallel(2, tp=2)}


HEADS = ("tied", "untied")


@cache
def folder(head: str) -> str:
    is_tied = head == "tied"
    return tiny_checkpoint(tempfile.mkdtemp(), vocab_size=ROWS, experts=False, tie_word_embeddings=is_tied)


def pairs(*factors: Iterable[Any]) -> list[Any]:
    return thinned(list(product(*factors)), lambda case: case, rest=pytest.mark.extended)


def trainer_of(device: Any, folder: str, masked: Any, parallel: Parallel, dtype: str = "float32") -> Any:
    mesh, config = Mesh.create(parallel), replace(ModelConfig.from_hf(folder), masked_ids=masked)
    model = Transformer(config, mesh, device, getattr(torch, dtype))
    load_weights(model, folder)
    return EmbeddedTrainEngine(model, mesh, device, TrainingConfig(token_budget=30), temperature=TEMPERATURE)


def trained(rank: int, device: Any, folder: str, masked: Any, parallel: Parallel, dtype: str = "float32"):
    """Log-probabilities, entropies, metrics and this rank's gradient of the lm head."""
    engine = trainer_of(device, folder, masked, parallel, dtype)
    algorithm = make_algorithm(AlgorithmConfig(kl_coef=0.1), LONGEST)
    batch = with_policy(sample_batch(12, seed=3), engine)
    logprobs, entropy = engine.logprobs(batch)
    metrics = engine.forward_backward(algorithm.weigh(batch), algorithm.loss)
    head = "embed" if engine.model.config.tie_embeddings else "lm_head"
    return logprobs, entropy, metrics, engine.optimizer.gradients.views[head].cpu()


def expected(folder: str, masked: Any) -> tuple[Sequences, torch.Tensor, torch.Tensor, float]:
    """The batch, float64 log-probabilities and entropies [N] by transformers, and the mean mass of the masked ids."""
    from transformers import AutoModelForCausalLM

    model, batch = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), sample_batch(12, seed=3)
    ids = [id for start, stop in masked for id in range(start, stop)]
    pieces = []
    for tokens, mask in zip(batch.tokens.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1] / TEMPERATURE
        mass = logits.softmax(-1)[:, ids].sum(-1)
        logits[:, ids] = -torch.inf
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).nan_to_num(0.0).sum(-1)
        columns = torch.stack([logp.gather(1, tokens[1:, None])[:, 0], entropy, mass], 1)
        pieces.append(torch.cat([torch.zeros(1, 3), columns]) * mask[:, None])
    logp, entropy, mass = torch.cat(pieces).unbind(1)
    return batch, logp, entropy, float(mass.sum() / batch.loss_mask.sum())


@pytest.mark.parametrize(("head", "mask", "layout"), pairs(HEADS, MASKS, LAYOUTS))
def test_log_probabilities_entropy_and_mass_are_those_without_the_masked_ids(head, mask, layout):
    parallel, masked = LAYOUTS[layout], MASKS[mask]
    results = run_ranks(trained, parallel.world, folder(head), masked, parallel)
    _, wanted, wanted_entropy, mass = expected(folder(head), masked)
    for logprobs, entropy, metrics, _ in results:
        torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy.double(), wanted_entropy, atol=1e-5, rtol=1e-5)
        if masked:
            assert metrics["training/masked_mass_mean"] == pytest.approx(mass, rel=1e-5) and mass > 0.1
        else:
            assert "training/masked_mass_mean" not in metrics
        assert all(torch.tensor(list(metrics.values())).isfinite())


@pytest.mark.parametrize(
    ("head", "mask", "layout"), pairs(HEADS, ("holes", "a whole shard"), (("TP1", "float32"), ("TP2", "bfloat16")))
)
def test_masked_ids_have_a_gradient_of_exactly_zero_and_the_others_one(head, mask, layout):
    (name, dtype), masked = layout, MASKS[mask]
    parallel = LAYOUTS[name]
    results = run_ranks(trained, parallel.world, folder(head), masked, parallel, dtype)
    gradient = torch.cat([gradient for *_, gradient in results])
    is_masked = torch.zeros(ROWS, dtype=torch.bool)
    for start, stop in masked:
        is_masked[start:stop] = True
    assert len(gradient) == ROWS and not gradient[is_masked].any()
    assert gradient[~is_masked].any(1).all() and gradient.isfinite().all()


FILTERS = [dict(), dict(top_p=0.9), dict(top_k=40), dict(min_p=0.001), dict(top_p=0.99, min_p=0.001)]


def sampled(rank: int, device: Any, folder: str, masked: Any, parallel: Parallel):
    """What an engine samples, and the trainer's log-probabilities of the responses that no filter has truncated."""
    engine = trainer_of(device, folder, masked, parallel)
    rollout = rollout_config(max_length=64, max_seqs=64, max_batch_tokens=512)
    generator = EmbeddedEngine(engine.model, engine.mesh, device, rollout, seed=5)
    generator.allocate_kv()
    params = [SamplingParams(max_tokens=24, temperature=TEMPERATURE, **filters) for filters in FILTERS]
    params += [SamplingParams(max_tokens=24, temperature=0)]
    if rank == 0:
        generator.submit(Request(f"{i}", (3 + i % 7, 5), params[i % len(params)]) for i in range(60))
    outputs = generator.run()
    generator.release_kv()
    whole: list[Any] = [[output for output in outputs if int(output.request_id) % len(params) == 0]]
    if parallel.world > 1:
        torch.distributed.broadcast_object_list(whole, 0)
    batch = sequences_of(*([torch.tensor(getattr(o, name)) for o in whole[0]] for name in ("prompt", "tokens")))
    return outputs, whole[0], engine.logprobs(batch)[0][batch.loss_mask]


@pytest.mark.parametrize(("head", "mask", "layout"), pairs(HEADS, ("holes", "a whole shard"), LAYOUTS))
def test_no_masked_id_is_sampled_and_the_trainer_agrees_with_the_engine(head, mask, layout):
    parallel, masked = LAYOUTS[layout], MASKS[mask]
    (outputs, whole, trainer), *_ = run_ranks(sampled, parallel.world, folder(head), masked, parallel)
    tokens = [token for output in outputs for token in output.tokens]
    assert len(outputs) == 60 and len(tokens) > 600
    assert not [token for token in tokens if any(start <= token < stop for start, stop in masked)]
    engine = torch.tensor([logprob for output in whole for logprob in output.logprobs])
    assert len(engine) > 100
    assert float((trainer - engine).abs().mean()) < 1e-6 and float((trainer - engine).abs().max()) < 1e-5
