"""The cost of an engine's step from sums of what it computes equals that from its sequences."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.pace import EngineCost, Pace, StepSums
from fusion.costmodel.presets import load_shape
from fusion.costmodel.roofline import attention_pairs
from fusion.model import Parallel
from fusion.resources import SHAPES

CONTEXTS = st.lists(st.integers(1, 9000), max_size=12).map(tuple)
CHUNKS = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 900)), max_size=3).map(tuple)


@cache
def cost_of(model: str, scale: int) -> EngineCost:
    pace = Pace(load_shape(model, SHAPES).shape, hardware_named("ascend_910c"), scale, 3.0)
    return EngineCost(pace, Parallel(4, tp=2, ep=2), full_batch=16)


@pytest.mark.parametrize("model", ["qwen3_30b_a3b", "moonlight_16b_a3b"])
@pytest.mark.parametrize("scale", [1, 8])
@given(decodes=CONTEXTS, first=CONTEXTS, chunks=CHUNKS)
def test_sums_cost_what_the_sequences_cost(model, scale, decodes, first, chunks):
    cost = cost_of(model, scale)
    sums = StepSums(
        decodes=len(decodes),
        contexts=sum(decodes),
        first_tokens=len(first),
        first_contexts=sum(first),
        prefill_tokens=sum(count for count, _ in chunks),
        attended=sum(attention_pairs(*chunk) for chunk in chunks),
    )
    assert cost.step_s(sums) == pytest.approx(sum(cost(sums)[0].values()), rel=1e-9)
    if decodes:
        lines = cost.decode_lines(len(decodes))
        only = sum(cost(StepSums(len(decodes), sum(decodes)))[0].values())
        assert max(fixed + each * sum(decodes) for fixed, each in lines) == pytest.approx(only, rel=1e-9)


@pytest.mark.parametrize("model", ["qwen3_30b_a3b", "moonlight_16b_a3b"])
@given(contexts=st.lists(st.integers(1, 90_000), min_size=1, max_size=40).map(tuple), drafted=st.integers(0, 15))
def test_decode_lines_cost_what_verified_drafts_cost(model, contexts, drafted):
    cost = cost_of(model, 4)
    pairs = sum(attention_pairs(drafted, context) for context in contexts)
    lines = cost.decode_lines(len(contexts), drafted)
    seconds, _ = cost(StepSums(len(contexts), sum(contexts), drafted=drafted * len(contexts), drafted_pairs=pairs))
    assert max(fixed + each * sum(contexts) for fixed, each in lines) == pytest.approx(seconds["decode"], rel=1e-9)
