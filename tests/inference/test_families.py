"""Engines of every family generate what transformers does, in every layout, and record the routing of sparse layers."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch

from fusion.inference import EmbeddedEngine
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from tests.families import KINDS, family_checkpoint
from tests.helpers import run_ranks
from tests.inference.engines import by_id, card, generate, requests, tokens
from tests.rollouts import rollout_config

TOKENS = 16


@cache
def checkpoint(kind: str) -> str:
    return family_checkpoint(tempfile.mkdtemp(), kind, initializer_range=0.3)


def build(kind_folder: str, mesh: Mesh, device: Any, dtype: torch.dtype, routing: bool = False) -> EmbeddedEngine:
    model = Transformer(ModelConfig.from_hf(kind_folder), mesh, device, dtype)
    load_weights(model, kind_folder)
    made = EmbeddedEngine(model, mesh, device, rollout_config(max_length=256, max_seqs=8), seed=5, routing=routing)
    made.allocate_kv()
    return made


def theirs(kind: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint(kind), dtype=dtype).eval()
    model.set_experts_implementation("eager")  # its grouped kernel has no float64
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate_in_float64(kind: str) -> None:
    wanted = requests(6, temperature=0, max_tokens=TOKENS)
    got = tokens(generate(build(checkpoint(kind), Mesh.single(), card(), torch.float64), wanted))
    model = theirs(kind, torch.float64)
    for request in wanted[::3]:
        ids = torch.tensor([request.prompt])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        assert got[request.id] == want[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_in_float32_wherever_the_best_two_are_apart(kind: str) -> None:
    """With the card's fused operators."""
    wanted = requests(6, temperature=0, max_tokens=TOKENS)
    got = tokens(generate(build(checkpoint(kind), Mesh.single(), card(), torch.float32), wanted))
    model, compared = theirs(kind, torch.float32), 0
    for request in wanted[::3]:
        row = torch.tensor([request.prompt + tuple(got[request.id])])
        with torch.no_grad():
            logits = model(row).logits[0, len(request.prompt) - 1 : -1]
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] > 1e-4
        compared += int(clear.sum())
        assert (logits.argmax(-1) == row[0, len(request.prompt) :])[clear].all()
    assert compared > 10


COMPOSED = ("qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize(
    ("kind", "operators"),
    [
        pytest.param(kind, how, marks=() if how == "fused" or kind in COMPOSED else pytest.mark.extended)
        for kind in KINDS
        for how in ("fused", "composed")
    ],
    indirect=["operators"],
)
def test_batch_invariant_logprobs_are_those_of_a_request_alone(kind: str, operators: Any) -> None:
    loaded = Transformer(ModelConfig.from_hf(checkpoint(kind)), Mesh.single(), card(), batch_invariant=True)
    load_weights(loaded, checkpoint(kind))
    config = rollout_config(max_length=256, max_seqs=8, batch_invariant=True, prefix_cache=False)
    made = EmbeddedEngine(loaded, Mesh.single(), card(), config, seed=5)
    made.allocate_kv()
    wanted = requests(9, max_tokens=TOKENS)
    together = by_id(generate(made, wanted))
    assert {request.id: by_id(generate(made, [request]))[request.id] for request in wanted} == together


def generate_rank(rank: int, device: Any, folder: str, parallel: Parallel, routing: bool) -> list[Any]:
    made = build(folder, Mesh.create(parallel), device, torch.float32, routing)
    if rank == 0:
        made.submit(requests(6, max_tokens=TOKENS))
    return made.run()


LAYOUTS = [
    ("deepseek_v3", Parallel(4, tp=2, ep=2)),
    ("olmoe", Parallel(4, tp=4, ep=2)),
    ("qwen2_moe", Parallel(2, tp=2, ep=2)),
    ("glm4_moe", Parallel(3, pp=3)),  # the first stage has no sparse layer
]
EXTENDED = [
    ("deepseek_v2", Parallel(2, tp=2)),
    ("deepseek_v3", Parallel(2, ep=2)),
    ("deepseek_v3", Parallel(4, tp=2, pp=2)),
    ("pangu_ultra_moe", Parallel(4, tp=2, ep=2)),
    ("llama", Parallel(2, tp=2)),
    ("qwen2", Parallel(4, tp=2, pp=2)),
    ("mixtral", Parallel(2, ep=2)),
    ("glm4_moe", Parallel(4, tp=2, ep=2)),
    ("qwen3_moe", Parallel(2, ep=2)),
]


@pytest.mark.parametrize(
    ("kind", "parallel"), [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.extended) for case in EXTENDED)], ids=str
)
def test_every_layout_samples_the_same_tokens_and_routes_alike(kind: str, parallel: Parallel) -> None:
    routing = bool(ModelConfig.from_hf(checkpoint(kind)).num_experts)
    one = build(checkpoint(kind), Mesh.single(), card(), torch.float32, routing)
    wanted = {output.request_id: output for output in generate(one, requests(6, max_tokens=TOKENS))}
    results = run_ranks(generate_rank, parallel.world, checkpoint(kind), parallel, routing)
    outputs = [output for own in results for output in own]
    assert {output.request_id: output.tokens for output in outputs} == {id: one.tokens for id, one in wanted.items()}
    for output in outputs:
        expected = wanted[output.request_id].routing
        assert (output.routing is None) == (expected is None)
        if expected is not None and output.routing is not None:
            assert output.routing.shape[1] == ModelConfig.from_hf(checkpoint(kind)).num_sparse_layers
            assert torch.equal(output.routing, expected)
