"""Every family is switched bitwise: by plan between random layouts and formats, by real exchanges there and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.ep_switch import Switcher, Topology, plan_switch
from fusion.model import ModelConfig, Parallel
from fusion.model.formats import EMBEDDED, MEGATRON, STACKED
from tests.ep_switch.oracle import BUCKETS, check_contents, random_layout
from tests.ep_switch.switching import BUCKET, End, assert_filled, build_pair, execute
from tests.families import KINDS, family_config, random_fields
from tests.helpers import run_ranks

FAMILIES = dict(kind=st.sampled_from([*KINDS]), data=st.data(), bucket_bytes=st.sampled_from(BUCKETS))


@settings(max_examples=8)
@given(**FAMILIES)
def test_a_plan_brings_every_element_to_its_place(kind: str, data: st.DataObject, bucket_bytes: int) -> None:
    check_plan(kind, data, bucket_bytes)


@pytest.mark.extended
@settings(max_examples=50)
@given(**FAMILIES)
def test_many_plans_bring_every_element_to_its_place(kind: str, data: st.DataObject, bucket_bytes: int) -> None:
    check_plan(kind, data, bucket_bytes)


def check_plan(kind: str, data: st.DataObject, bucket_bytes: int) -> None:
    config = ModelConfig.from_hf(data.draw(random_fields(kind)))
    source, target = (
        random_layout(lambda values: data.draw(st.sampled_from(list(values))), config, range(8), bucket_bytes, format)
        for format in (data.draw(st.sampled_from([EMBEDDED, MEGATRON])), EMBEDDED)
    )
    if data.draw(st.booleans()):
        source, target = target, source
    check_contents(plan_switch(source, target, bucket_bytes, topology=Topology.single_node()))


def onto_other_cards(rank: int, device: Any, config: ModelConfig, ends: tuple[End, End], exchange: Any) -> None:
    layouts = [end.layout(config) for end in ends]
    source, target = build_pair(*layouts, device)
    for _ in range(2):
        if target is not None:
            target.weights.release()
            target.weights.card.zero_()
        plan = plan_switch(*layouts, BUCKET, keep=True)
        execute(plan, source, target, device=device, exchange=exchange)
        assert_filled(source, via=torch.bfloat16)
        assert_filled(target, via=torch.bfloat16)


@pytest.mark.parametrize("exchange", ["collective", pytest.param("shared", marks=pytest.mark.extended)])
def test_cards_that_only_generate_receive_correction_biases_in_float32(exchange: Any) -> None:
    """They train on the first two, in two stages; the last card has no part in it."""
    bf16 = torch.bfloat16
    ends = End(Parallel(2, pp=2), (1, 0), bf16), End(Parallel(2, tp=2), (2, 3), bf16)
    run_ranks(onto_other_cards, 5, family_config("glm4_moe"), ends, exchange)


def there_and_back(rank: int, device: Any, config: ModelConfig, one: End, other: End) -> None:
    ends = [one.layout(config), other.layout(config)]
    source, target = build_pair(*ends, device)
    for way, (first, second) in (((0, 1), (source, target)), ((1, 0), (target, source))):
        plan = plan_switch(ends[way[0]], ends[way[1]], BUCKET)
        Switcher(plan, first, second, device=device).run(False)
        assert_filled(second, via=torch.float32)


TRAIN, INFER = End(Parallel(4, tp=2, ep=2, pp=2)), End(Parallel(4, ep=4))
DENSE = End(Parallel(4, tp=2, pp=2)), End(Parallel(2), (0, 1))
CASES = [
    ("glm4_moe", End(Parallel(4, tp=2, ep=2, pp=2)), End(Parallel(4, tp=4, ep=4))),
    ("qwen2_moe", End(Parallel(4, tp=2, etp=2, ep=2)), INFER),
    ("deepseek_v3", End(Parallel(4, tp=2, ep=2, pp=2)), End(Parallel(4, tp=4, ep=4))),
    ("pangu_ultra_moe", End(Parallel(4, tp=2, ep=2)), INFER),
    ("qwen3_moe", replace(TRAIN, format=STACKED), replace(INFER, format=STACKED)),
]
EXTENDED = [
    ("olmoe", TRAIN, End(Parallel(4, tp=4, ep=2))),
    ("mixtral", End(Parallel(4, tp=2, ep=2)), INFER),
    ("llama", *DENSE),
    ("qwen2", *DENSE),
    ("qwen3_moe", TRAIN, INFER),
    ("deepseek_v2", TRAIN, INFER),
]


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.extended) for case in EXTENDED)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_there_and_back_is_bitwise(kind: str, one: End, other: End) -> None:
    run_ranks(there_and_back, 4, family_config(kind), one, other)
