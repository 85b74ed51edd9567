"""Rows of common prefixes are computed once, and loss, gradients, log-probabilities and biases are those of whole
sequences: in every layout, with every algorithm and aggregation, with adapters and with routing that is replayed."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from fusion.colocate.frozen.scoring import token_logprobs
from fusion.model import Parallel
from fusion.model.prefixes import links
from fusion.npu.operators import Plain, operators_of
from fusion.training import AlgorithmConfig, EmbeddedTrainEngine, Sequences, split_over_ranks
from fusion.training.algorithms import cross_entropy, make_algorithm
from fusion.training.batch import UNREAD
from fusion.training.config import AGGREGATIONS, ALGORITHMS
from fusion.training.micro_batches import split_micro_batches
from fusion.training.objective import SHARED
from tests.families import family_checkpoint
from tests.helpers import run_ranks, tiny_checkpoint
from tests.training.ranks import LONGEST, Case, make_engine, with_policy
from tests.training.sequences import sequences_of

LAYERS, EXPERTS, K = 2, 8, 2
BALANCES = {"load_balancing_coef": 0.05, "token_budget": 60, "recompute": True}
SEQUENCES = {"load_balancing_coef": 0.05, "load_balancing": "sequence"}
LORA = {"rank": 4, "targets": ["attention", "mlp", "experts"]}


@cache
def checkpoint(kind: str = "qwen3_moe") -> str:
    if kind == "qwen3_moe":
        return tiny_checkpoint(tempfile.mkdtemp(), num_hidden_layers=LAYERS)
    return family_checkpoint(tempfile.mkdtemp(), kind)


def groups(seed: int) -> tuple[Sequences, list[int]]:
    """Groups of 4, 3, 1 and 2 responses, and what each has in common with the one before. In the second a conversation
    goes two ways; one response is empty, one equal to another, and one is left out of the loss."""
    random = torch.Generator().manual_seed(seed)

    def tokens(size: int) -> list[int]:
        return torch.randint(1, 32, (size,), generator=random).tolist()

    first, second, third, fourth = tokens(17), tokens(9), tokens(3), tokens(12)
    turn, same = tokens(5), tokens(6)
    prompts = [first] * 4 + [second] * 3 + [third] + [fourth] * 2
    responses = [
        tokens(4),
        [],
        tokens(7),
        tokens(1),
        turn + tokens(3),
        turn + tokens(6),
        tokens(2),
        tokens(8),
        same,
        same,
    ]
    noise = [(0.3 * torch.randn(len(one), generator=random)).tolist() for one in responses]
    batch = sequences_of(
        prompts,
        responses,
        advantages=torch.randn(len(prompts), generator=random),
        behaviour_logprobs=noise,
        ref_logprobs=noise,
        versions=[[3] * len(one) for one in responses],
        trained=[index != 2 for index in range(len(prompts))],
    )
    whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    common = [0] + [
        next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        for one, two in pairwise(whole)
    ]
    return replace(batch, version=3), common


def of_stage(batch: Sequences, engine: EmbeddedTrainEngine, routing: str, common: list[int]) -> Sequences:
    """What this rank reads of the batch."""
    mesh = engine.mesh
    shared = links(batch.lengths, common, "on")
    if routing:
        random = torch.Generator().manual_seed(5)
        experts = torch.rand(batch.rows, LAYERS, EXPERTS, generator=random).topk(K).indices.to(torch.uint8)
        own = mesh.parallel.layers(LAYERS, mesh.pp_rank)
        for before, index in pairwise(range(len(batch.lengths))):
            # siblings were routed alike up to some row: of some the whole prompt, of others a part of it
            alike = common[index] if routing == "alike" else index * 3 % (common[index] + 1)
            rows, theirs = batch.rows_of([index])[:alike], batch.rows_of([before])[:alike]
            experts[rows] = experts[theirs]
        batch = replace(batch, routing=experts[:, own.start : own.stop])
    replica = mesh.dp_rank // mesh.parallel.cp
    batch = batch.select(split_over_ranks(batch.lengths, mesh.parallel.replicas, shared)[replica])
    if not mesh.first_stage:
        labels = batch.tokens.where(batch.loss_mask, UNREAD)
        batch = replace(batch, held_tokens=labels if mesh.last_stage else None)
    return batch


def trained(rank: int, device: Any, case: Case, share: str, routing: str = "") -> dict[str, Any]:
    """What a pass over the batch, and one over its continuation, compute with or without shared rows."""
    case = case._replace(training={**case.training, "share_prefixes": share})
    engine = make_engine(case, device)
    algorithm = make_algorithm(AlgorithmConfig(**({"kl_coef": 0.1} | case.algorithm)), LONGEST)
    metrics, logprobs = [], []
    for seed in range(2):
        batch, common = groups(seed)
        batch = with_policy(of_stage(batch, engine, routing, common), engine)
        if routing == "own":
            batch = engine.with_own_routing(replace(batch, routing=None))
        logprobs.append(engine.logprobs(batch)[0])
        metrics.append(engine.forward_backward(algorithm.weigh(batch), algorithm.loss, continued=seed > 0))
    step = engine.optimizer_step()
    # the first moment after one step: the gradient of the whole batch, of which a rank had a part until then
    gradients = [flat.cpu() for name, flat in engine.optimizer.tensors().items() if name.startswith("exp_avg.")]
    card = engine.model.weights.card.cpu().clone()
    return {"metrics": [*metrics, step], "logprobs": logprobs, "gradients": gradients, "biases": card}


def trained_on_ascend(rank: int, device: Any, case: Case, share: str, routing: str) -> dict[str, Any]:
    before, device.operators = device.operators, operators_of("emulated", "ascend")
    try:
        return trained(rank, device, case, share, routing)
    finally:
        device.operators = before


def assert_alike(layout: Parallel, case: Case, routing: str = "", run: Any = trained) -> float:
    """Assert that sharing changes nothing on any rank; return the share of rows that it saves."""
    whole, shared = (run_ranks(run, layout.world, case, share, routing) for share in ("off", "on"))
    assert not any(metrics.pop(SHARED, 0.0) for rank in whole for metrics in rank["metrics"])
    saved = max(metrics.pop(SHARED, 0.0) for rank in shared for metrics in rank["metrics"])
    for one, other in zip(whole, shared, strict=True):
        for wanted, found in zip(one["metrics"], other["metrics"], strict=True):
            assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        for wanted, found in zip(one["logprobs"], other["logprobs"], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other["biases"], one["biases"], rtol=0, atol=0)
        assert any(gradient.any() for gradient in one["gradients"])
        for wanted, found in zip(one["gradients"], other["gradients"], strict=True):
            assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())
    return saved


LAYOUTS = {
    "TP2EP2": (Parallel(2, tp=2, ep=2), BALANCES),
    "DP2": (Parallel(2), SEQUENCES),
    "TP2PP2EP2": (Parallel(4, tp=2, ep=2, pp=2), SEQUENCES),
    "PP2": (Parallel(2, pp=2), BALANCES | {"token_budget": 20}),  # less than a tree, and than some sequences
    "PP2DP2": (Parallel(4, pp=2), BALANCES),
    "TP2ETP2EP2": (Parallel(4, tp=2, ep=2, etp=2), BALANCES),
    "EP4": (Parallel(4, ep=4), SEQUENCES),
    "TP4": (Parallel(4, tp=4), {}),
    "CP2TP2": (Parallel(4, tp=2, cp=2), BALANCES),
    "CP2PP2": (Parallel(4, pp=2, cp=2), SEQUENCES),
}
DEFAULT = ("DP2", "TP2PP2EP2", "CP2TP2")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.extended) for name in LAYOUTS]
)
def test_a_layout_computes_what_it_does_without_shared_rows(name):
    layout, training = LAYOUTS[name]
    saved = assert_alike(layout, Case(checkpoint(), layout, training=training))
    assert saved > (0.05 if name == "PP2" else 0.2)


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        pytest.param(name, aggregation, marks=() if name == "gspo" else pytest.mark.extended)
        for name in ALGORITHMS
        for aggregation in AGGREGATIONS
    ],
)
def test_every_algorithm_and_aggregation_computes_the_same(name, aggregation):
    correction = "mask_sequence" if name == "gspo" else "tis_sequence"
    algorithm = {"name": name, "loss_aggregation": aggregation, "correction": correction}
    case = Case(checkpoint(), training={"token_budget": 60, "load_balancing_coef": 0.0}, algorithm=algorithm)
    assert assert_alike(Parallel(), case) > 0.2


@pytest.mark.parametrize(
    ("kind", "training", "lora"),
    [
        ("deepseek_v3", SEQUENCES | {"router_bias_rate": 0.01}, {}),
        pytest.param("glm4_moe", BALANCES | {"router_bias_rate": 0.01}, {}, marks=pytest.mark.extended),
        ("qwen3_moe", BALANCES, LORA),
        pytest.param("deepseek_v3", {"load_balancing_coef": 0.0}, LORA, marks=pytest.mark.extended),
    ],
)
def test_families_and_adapters_compute_the_same(kind, training, lora):
    assert assert_alike(Parallel(), Case(checkpoint(kind), training=training, lora=lora)) > 0.2


@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.extended)])
def test_ascends_operators_compute_the_same(kind):
    assert assert_alike(Parallel(), Case(checkpoint(kind), training=BALANCES), run=trained_on_ascend) > 0.2


TP2EP2 = Parallel(2, tp=2, ep=2)
DEFAULT_REPLAYS = (("alike", Parallel()), ("uneven", TP2EP2), ("own", TP2EP2))


@pytest.mark.parametrize(
    ("routing", "layout", "balancing"),
    [
        pytest.param(routing, *case, marks=() if (routing, case[0]) in DEFAULT_REPLAYS else pytest.mark.extended)
        for routing in ("alike", "uneven", "own")
        for case in ((Parallel(), 0.05), (Parallel(4, tp=2, pp=2), 0.05), (TP2EP2, 0.0))
    ],
)
def test_rows_are_shared_under_replay_where_their_experts_are_equal(routing, layout, balancing):
    training = BALANCES | {"load_balancing_coef": balancing}
    saved = assert_alike(layout, Case(checkpoint(), layout, training=training), routing)
    assert saved > (0 if routing == "uneven" else 0.2)


def test_a_recorded_routing_is_that_of_every_sequence(device):
    whole, shared = (
        make_engine(Case(checkpoint(), training={"share_prefixes": share}), device) for share in ("off", "on")
    )
    batch, _ = groups(0)
    assert torch.equal(whole.with_own_routing(batch).routing, shared.with_own_routing(batch).routing)


def test_a_frozen_reference_shares_rows_too(device):
    engine = make_engine(Case(checkpoint()), device)
    batch, _ = groups(0)
    rows: list[int] = []
    model = engine.model
    hook = model.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    whole, shared = (
        token_logprobs(model, batch, token_budget=90, temperature=1.0, share=share) for share in ("off", "on")
    )
    hook.remove()
    torch.testing.assert_close(shared, whole, rtol=1e-5, atol=1e-5)
    assert whole.any() and sum(rows) < 1.8 * batch.rows


def test_the_same_bits_come_out_twice(device):
    found = []
    for _ in range(2):
        engine = make_engine(Case(checkpoint(), dtype="bfloat16", training={"share_prefixes": "on"}), device)
        batch, _ = groups(0)
        engine.forward_backward(with_policy(batch, engine), make_algorithm(AlgorithmConfig(), LONGEST).loss)
        found.append([flat.cpu().clone() for flat in engine.gradients().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_short_prompts_are_not_shared_unless_asked_for(device):
    """Where `auto` builds no tree, every bit is that of whole sequences."""
    batch, _ = groups(0)
    engines = [make_engine(Case(checkpoint(), training={"share_prefixes": share}), device) for share in ("auto", "off")]
    metrics = [engine.forward_backward(batch, cross_entropy) for engine in engines]
    assert metrics[0] == metrics[1] and metrics[0][SHARED] == 0
    for one, other in zip(*(engine.gradients().values() for engine in engines), strict=True):
        assert torch.equal(one, other)


def test_attention_is_one_call_of_as_many_keys_as_a_sequence_has(device, monkeypatch):
    calls: list[tuple[list[int], list[int] | None]] = []
    table = type(device.operators)
    attend = table.varlen_attention

    def noted(self: Plain, q: Any, k: Any, v: Any, lengths: Any, scale: Any = None, kv_lengths: Any = None) -> Any:
        calls.append((lengths, kv_lengths))
        return attend(self, q, k, v, lengths, scale, kv_lengths)

    monkeypatch.setattr(table, "varlen_attention", noted)
    engine = make_engine(Case(checkpoint(), training={"share_prefixes": "on"}), device)
    batch, common = groups(0)
    engine.logprobs(batch)
    _, (micro,) = split_micro_batches(batch, 1000, share="on", mesh=engine.mesh)
    own = [length - same for length, same in zip(batch.lengths, common, strict=True)]
    assert len(calls) == LAYERS and calls[0] == calls[1]
    assert sum(calls[0][0]) == micro.num_computed == sum(own) and all(calls[0][0])
    wanted = sum(length for length, rows in zip(batch.lengths, own, strict=True) if rows)
    assert sum(calls[0][1] or []) == wanted
