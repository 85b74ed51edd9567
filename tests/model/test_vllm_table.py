"""The invariants of `fusion.model.formats.vllm`, over random layouts and families; no vLLM needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fusion.model import ModelConfig, Parallel, global_params, local_params, plan_units
from fusion.model.formats import vllm
from tests.families import family_config, random_fields
from tests.helpers import tiny_config

VARIANTS = [vllm.CUDA, vllm.CPU, vllm.ASCEND]
SIZES = st.sampled_from([1, 2, 4])
FIXED: dict[str, dict[str, Any]] = {
    "olmoe": dict(rms_norm_eps=vllm.OLMOE_EPS, norm_topk_prob=False),
    "deepseek_v3": dict(rope_interleave=True),
}
"""What vLLM's model of a family computes with"""


@st.composite
def cases(draw: st.DrawFn):
    kind = draw(st.sampled_from(vllm.FAMILIES))
    config = ModelConfig.from_hf(
        draw(random_fields(kind)) | FIXED.get(kind, {}) | dict(vocab_size=draw(st.sampled_from([32, 72, 128])))
    )
    tp, dp, etp = draw(SIZES), draw(SIZES), draw(st.booleans())
    dp = dp if config.num_experts else 1
    parallel = Parallel(tp * dp, tp, *((1, 1, tp * dp) if etp else (tp * dp, 1, 1)))
    if not config.num_experts:
        parallel = Parallel(tp, tp)
    return config, parallel, draw(st.sampled_from(VARIANTS))


def tables(config, parallel, variant=vllm.CUDA):
    return [vllm.local_params(config, parallel, rank, variant) for rank in range(parallel.world)]


@given(cases())
def test_parts_cover_every_global_tensor_and_what_none_fills_is_the_padding(case):
    config, parallel, variant = case
    assume(not vllm.misfit(config, parallel))
    covered = {name: np.zeros(shape, int) for name, shape in global_params(config.without_predictors).items()}
    padding = 0
    for table in tables(config, parallel, variant):
        assert len({param.name for param in table}) == len(table)
        for param in table:
            tiled = np.zeros(param.shape, int)
            for part in param.parts:
                region = tuple(stop - start for start, stop in part.region)
                assert tuple(part.view(torch.from_numpy(tiled)).shape) == region
                covered[part.name][tuple(slice(*span) for span in part.region)] += 1
                tiled[tuple(slice(*span) for span in part.local)] += 1
            assert tiled.max(initial=0) <= 1, param.name
            for hole in param.holes:
                tiled[tuple(slice(*span) for span in hole)] += 1
                padding += tiled[tuple(slice(*span) for span in hole)].size
            assert (tiled == 1).all(), f"{param.name}: holes are exactly what no part fills"
            assert not param.holes or param.name in ("model.embed_tokens.weight", "lm_head.weight")
    for name, count in covered.items():
        assert (count >= 1).all(), name
        assert count.max() == 1 or ".experts." not in name, f"{name} is held by one rank of an engine"
    vocabularies = (1 if config.tie_embeddings else 2) * parallel.dp
    assert padding == vocabularies * (-config.vocab_size % 64) * config.hidden_size


def test_a_rank_whose_rows_are_all_padding_has_a_tensor_without_parts():
    config = tiny_config(vocab_size=72)  # padded to 128, 32 rows a rank
    shares = []
    for table in tables(config, Parallel(4, tp=4, etp=4)):
        embed = table[0]
        shares.append([(part.region[0], part.local[0]) for part in embed.parts])
        assert embed.shape == (32, config.hidden_size)
        assert {param.name for unit in plan_units(table, 4, 1 << 20) for param, _ in unit.entries} == {
            param.name for param in table
        }
    assert shares == [[((0, 32), (0, 32))], [((32, 64), (0, 32))], [((64, 72), (0, 8))], []]


def test_key_value_heads_are_replicated_beyond_their_number():
    config = tiny_config(num_key_value_heads=2)
    rows = [
        [
            part.region[0]
            for param in table
            if param.name.endswith("0.self_attn.qkv_proj.weight")
            for part in param.parts
        ]
        for table in tables(config, Parallel(4, tp=4, ep=4))
    ]
    assert rows == [
        [(0, 16), (0, 16), (0, 16)],
        [(16, 32), (0, 16), (0, 16)],
        [(32, 48), (16, 32), (16, 32)],
        [(48, 64), (16, 32), (16, 32)],
    ]


def test_the_ascend_variant_stores_the_same_boxes_transposed():
    config, parallel = tiny_config(), Parallel(2, ep=2)
    cpu, ascend = (tables(config, parallel, variant)[1] for variant in (vllm.CPU, vllm.ASCEND))
    experts = 0
    for one, other in zip(cpu, ascend, strict=True):
        assert one.name == other.name
        assert [(p.name, p.region) for p in one.parts] == [(p.name, p.region) for p in other.parts]
        if one.expert:
            assert other.shape == (one.shape[0], *one.shape[:0:-1])
            assert all(part.transposed for part in other.parts)
            experts += 1
        else:
            assert one == other
    assert experts == 2 * config.num_layers


def test_slices_that_the_embedded_format_stores_alike_are_units_of_equal_content():
    config = tiny_config(tie_word_embeddings=False, vocab_size=128)
    for parallel in (Parallel(2, tp=2, ep=2), Parallel(4, ep=4)):
        for rank, table in enumerate(tables(config, parallel)):
            ours = plan_units(local_params(config, parallel, rank), 4, 1 << 20)
            theirs = {unit.content for unit in plan_units(table, 4, 1 << 20)}
            own = {param.name for unit in ours if unit.content not in theirs for param, _ in unit.entries}
            assert own and all(".moe.experts." in name for name in own)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(2, pp=2), "pp=2: the vLLM backend has no pipeline stages"),
        (Parallel(2, tp=2), "ep=1 with etp=1: vLLM distributes experts over all 2 ranks"),
        (Parallel(4, tp=2, ep=2), "set ep=4 and etp=1, or ep=1 and etp=4"),
        (Parallel(4, tp=2, ep=2, etp=2), "ep=2 with etp=2"),
        (Parallel(3, tp=3, etp=3), "tp=3 does not divide the 64 rows of the padded vocabulary"),
    ],
)
def test_layouts_that_vllm_cannot_form_are_refused(parallel, message):
    with pytest.raises(ValueError, match=message):
        vllm.local_params(tiny_config(), parallel, 0)


def test_models_that_vllm_computes_otherwise_are_refused():
    with pytest.raises(ValueError, match="the vLLM backend does not describe the family glm4_moe; expected"):
        vllm.local_params(family_config("glm4_moe"), Parallel(), 0)
    with pytest.raises(ValueError, match="rms_norm_eps=1e-05 and norm_topk_prob=false only.* rms_norm_eps=1e-06"):
        vllm.local_params(family_config("olmoe", rms_norm_eps=1e-6), Parallel(), 0)
