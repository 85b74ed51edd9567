"""Megatron-Core's model in the train engine computes what the embedded one does, in every kind of layout."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fusion.model import Parallel
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
    "TP4": dict(config=tiny_config(num_key_value_heads=4), layout=Parallel(4, tp=4, ep=2)),
}


def check(results, atol=1e-5):
    for by_model in results:
        ours, theirs = by_model["embedded"], by_model["megatron"]
        for step, (one, other) in enumerate(zip(ours["steps"], theirs["steps"], strict=True)):
            assert one.keys() == other.keys()
            for name in one:
                what = f"step {step}, {name}: "
                torch.testing.assert_close(other[name], one[name], rtol=atol, atol=atol, msg=what.__add__)
        assert ours["steps"][0]["actor/grad_norm"] > 0.01
        if ours["routing"] is not None:
            torch.testing.assert_close(*(found["routing"].sort(-1).values for found in (ours, theirs)))


def test_bfloat16_differs_from_the_embedded_model_by_its_rounding_alone():
    from tests.training.megatron_ranks import Case, both

    case = Case(MOE, Parallel(4, tp=2, ep=2), dtype="bfloat16", steps=1)
    for by_model in run_ranks(both, 4, case, timeout_s=300):
        (ours,), (theirs,) = (by_model[name]["steps"] for name in ("embedded", "megatron"))
        assert float((ours["logprobs"] - theirs["logprobs"]).abs().mean()) < 0.01
        assert theirs["actor/grad_norm"] == pytest.approx(ours["actor/grad_norm"], rel=0.02)


@pytest.mark.parametrize("name", CASES)
def test_logprobs_loss_and_gradient_norm_are_those_of_the_embedded_model(name):
    from tests.training.megatron_ranks import Case, both

    case = Case(**CASES[name])
    check(run_ranks(both, case.layout.world, case, timeout_s=300))
