"""Megatron-Core's model in the train engine computes what the embedded one does, in every kind of layout."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from fusion.model import Parallel
from tests.families import LLAMA3, family_config
from tests.helpers import run_ranks, tiny_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="pip install -e .[megatron]"),
]

MOE = tiny_config(tie_word_embeddings=False)
TIED = tiny_config()
CASES = {
    "one card": dict(config=MOE),
    "one card, tied, recompute": dict(config=TIED, training={"recompute": True}),
    "dense": dict(config=tiny_config(experts=False), layout=Parallel(2, tp=2)),
    "unnormalised": dict(config=tiny_config(norm_topk_prob=False)),
    "replay": dict(config=MOE, layout=Parallel(2, tp=2, ep=2), replay=True),
    "TP2EP2": dict(config=MOE, layout=Parallel(4, tp=2, ep=2)),
    "TP2EP2, one sample": dict(config=MOE, layout=Parallel(4, tp=2, ep=2), samples=1),
    "PP2, tied, recompute": dict(config=TIED, layout=Parallel(2, pp=2), training={"recompute": True}),
    "PP2TP2": dict(config=MOE, layout=Parallel(4, tp=2, pp=2, ep=2)),
    "EP2ETP2": dict(config=MOE, layout=Parallel(4, tp=2, ep=2, etp=2)),
    "ETP2 beside DP2": dict(config=MOE, layout=Parallel(4, tp=1, ep=1, etp=2)),
    "EP2ETP2 twice": dict(config=MOE, layout=Parallel(8, tp=2, ep=2, etp=2)),
    "masked ids, tied": dict(config=replace(tiny_config(vocab_size=64), masked_ids=((35, 36), (40, 64)))),
    "a masked shard, TP2PP2": dict(
        config=replace(tiny_config(vocab_size=64, tie_word_embeddings=False), masked_ids=((32, 64),)),
        layout=Parallel(4, tp=2, pp=2, ep=2),
    ),
    "TP4": dict(config=tiny_config(num_key_value_heads=4), layout=Parallel(4, tp=4, ep=2)),
}

BALANCED = {"load_balancing_coef": 0.05}
SEQUENCES = BALANCED | {"load_balancing": "sequence"}
DEEPSEEK = family_config("deepseek_v3")
PLAIN = family_config(
    "deepseek_v3", rope_interleave=False, rope_parameters=None, first_k_dense_replace=0, q_lora_rank=None
)
FAMILIES = {
    "deepseek_v3": dict(config=DEEPSEEK, training={"router_bias_rate": 0.01} | BALANCED),
    "deepseek_v3, halves rotated, no low-rank queries, no dense layer": dict(
        config=PLAIN, training={"recompute": True}
    ),
    "deepseek_v3, TP2": dict(config=DEEPSEEK, layout=Parallel(2, tp=2), training={"recompute": True} | SEQUENCES),
    "deepseek_v3, PP2": dict(config=DEEPSEEK, layout=Parallel(2, pp=2), training=BALANCED),
    "deepseek_v3, uneven stages": dict(
        config=family_config("deepseek_v3", num_hidden_layers=5, num_nextn_predict_layers=1),
        layout=Parallel(3, pp=3),
        training={"router_bias_rate": 0.01} | SEQUENCES,
    ),
    "deepseek_v3, TP2EP2, replay": dict(config=DEEPSEEK, layout=Parallel(2, tp=2, ep=2), replay=True),
    "deepseek_v3, PP2TP2EP2": dict(
        config=DEEPSEEK, layout=Parallel(4, tp=2, pp=2, ep=2), training={"router_bias_rate": 0.01} | SEQUENCES
    ),
    "deepseek_v3, TP2EP2ETP2": dict(config=DEEPSEEK, layout=Parallel(4, tp=2, ep=2, etp=2), training=BALANCED),
    "deepseek_v3, TP4EP2, few rows": dict(
        config=DEEPSEEK, layout=Parallel(4, tp=4, ep=2), samples=3, training={"token_budget": 10} | SEQUENCES
    ),
    "deepseek_v3, TP2 beside DP2": dict(config=DEEPSEEK, layout=Parallel(4, tp=2, ep=4), samples=1),
    "deepseek_v2, TP2": dict(config=family_config("deepseek_v2"), layout=Parallel(2, tp=2), training=BALANCED),
    "pangu_ultra_moe, PP2TP2": dict(config=family_config("pangu_ultra_moe"), layout=Parallel(4, tp=2, pp=2)),
    "glm4_moe, TP2EP2": dict(
        config=family_config("glm4_moe"),
        layout=Parallel(2, tp=2, ep=2),
        training={"router_bias_rate": 0.01} | SEQUENCES,
        replay=True,
    ),
    "qwen2_moe, TP2EP2": dict(config=family_config("qwen2_moe"), layout=Parallel(2, tp=2, ep=2)),
    "qwen3_moe with a dense layer, PP3": dict(config=family_config("qwen3_moe"), layout=Parallel(3, pp=3)),
    "olmoe, TP2": dict(config=family_config("olmoe"), layout=Parallel(2, tp=2)),
    "olmoe with biases, EP2": dict(config=family_config("olmoe", attention_bias=True), layout=Parallel(2, ep=2)),
    "mixtral, TP2EP2": dict(config=family_config("mixtral"), layout=Parallel(2, tp=2, ep=2)),
    "llama with biases, TP2": dict(config=family_config("llama"), layout=Parallel(2, tp=2)),
    "llama3's rotation, PP2": dict(config=family_config("llama", rope_parameters=LLAMA3), layout=Parallel(2, pp=2)),
    "qwen2, TP2": dict(config=family_config("qwen2"), layout=Parallel(2, tp=2)),
}


def check(results, case, atol=1e-5):
    for by_model in results:
        ours, theirs = by_model["embedded"], by_model["megatron"]
        for step, (one, other) in enumerate(zip(ours["steps"], theirs["steps"], strict=True)):
            assert one.keys() == other.keys()
            for name in one:
                what = f"step {step}, {name}: "
                torch.testing.assert_close(other[name], one[name], rtol=atol, atol=atol, msg=what.__add__)
        assert ours["steps"][0]["actor/grad_norm"] > 0.01
        for one, other in zip(ours["corrections"], theirs["corrections"], strict=True):
            assert torch.equal(one, other)
        if case.training.get("router_bias_rate"):
            assert not torch.equal(*theirs["corrections"])
        if ours["routing"] is not None:
            torch.testing.assert_close(*(found["routing"].sort(-1).values for found in (ours, theirs)))


@pytest.mark.parametrize("config", [MOE, DEEPSEEK], ids=["qwen3_moe", "deepseek_v3"])
def test_bfloat16_differs_from_the_embedded_model_by_its_rounding_alone(config):
    from tests.training.megatron_ranks import Case, both

    case = Case(config, Parallel(4, tp=2, ep=2), dtype="bfloat16", steps=1)
    for by_model in run_ranks(both, 4, case, timeout_s=300):
        (ours,), (theirs,) = (by_model[name]["steps"] for name in ("embedded", "megatron"))
        assert float((ours["logprobs"] - theirs["logprobs"]).abs().mean()) < 0.01
        assert theirs["actor/grad_norm"] == pytest.approx(ours["actor/grad_norm"], rel=0.02)


@pytest.mark.parametrize("name", CASES | FAMILIES)
def test_logprobs_loss_and_gradient_norm_are_those_of_the_embedded_model(name):
    from tests.training.megatron_ranks import Case, both

    case = Case(**(CASES | FAMILIES)[name])
    check(run_ranks(both, case.layout.world, case, timeout_s=300), case)


@pytest.mark.parametrize("writer", ["megatron", "embedded"])
def test_the_other_backend_resumes_a_checkpoint_in_another_layout(writer, tmp_path):
    """With predictors of further tokens, correction biases that move, and bfloat16 weights with their masters."""
    from tests.training.megatron_ranks import Case, load, save
    from tests.training.test_checkpoint import whole

    config = family_config("deepseek_v3", num_nextn_predict_layers=1)
    case = Case(config, Parallel(4, tp=2, ep=2, pp=2), {"router_bias_rate": 0.01, "token_budget": 40}, dtype="bfloat16")
    reader = "embedded" if writer == "megatron" else "megatron"
    saved = run_ranks(save, 4, writer, case, str(tmp_path), timeout_s=300)
    loaded = run_ranks(load, 2, reader, case._replace(layout=Parallel(2, tp=2)), str(tmp_path), timeout_s=300)
    (one, next_one), (other, next_other) = (([state for state, _ in ranks], ranks[0][1]) for ranks in (saved, loaded))
    before, after = whole(one), whole(other)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert any(".4.eh_proj" in name for name in before) and any("e_score_correction_bias" in name for name in before)
    weights, found = one[0][1], other[0][1]
    assert weights.keys() == found.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    for figure in ("actor/loss", "actor/grad_norm"):
        assert next_other[figure] == pytest.approx(next_one[figure], rel=0.02), figure
