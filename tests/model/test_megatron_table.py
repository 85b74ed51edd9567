"""The invariants of `fusion.model.formats.megatron`, over random layouts; no megatron-core needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.model import ModelConfig, Parallel, global_params, local_params
from fusion.model.families import FAMILIES
from fusion.model.formats import megatron
from tests.ep_switch.oracle import grids
from tests.families import KINDS, family_config, random_fields, with_predictors
from tests.helpers import tiny_config

KIND = st.sampled_from([*KINDS])


@settings(max_examples=60)
@given(kind=KIND, data=st.data())
def test_parts_cover_every_global_tensor_and_tile_every_local_one(kind, data):
    fields = data.draw(random_fields(kind))
    if FAMILIES[kind].predictors_field:
        fields = with_predictors(fields, data.draw(st.integers(0, 2)))
    config = ModelConfig.from_hf(fields)
    parallel = data.draw(st.sampled_from([grid for grid in grids(config, 8) if not megatron.misfit(config, grid)]))
    covered = {name: np.zeros(shape, int) for name, shape in global_params(config).items()}
    for rank in range(parallel.world):
        table = megatron.local_params(config, parallel, rank)
        assert len({param.name for param in table}) == len(table)
        for param in table:
            tiled = np.zeros(param.shape, int)
            for part in param.parts:
                covered[part.name][tuple(slice(*span) for span in part.region)] += 1
                tiled[tuple(slice(*span) for span in part.local)] += 1
            assert (tiled == 1).all(), param.name
    for name, count in covered.items():
        assert count.min() == count.max() >= 1, name


@settings(max_examples=40)
@given(kind=KIND, data=st.data())
def test_what_is_not_in_units_is_that_of_the_embedded_format(kind, data):
    """So a switch copies the values on the card, and a checkpoint finds those on the host, whatever the formats."""
    fields = data.draw(random_fields(kind))
    config = ModelConfig.from_hf(with_predictors(fields, 1) if FAMILIES[kind].predictors_field else fields)
    parallel = data.draw(st.sampled_from([grid for grid in grids(config, 8) if not megatron.misfit(config, grid)]))
    for rank in range(parallel.world):
        theirs, ours = (table(config, parallel, rank) for table in (megatron.local_params, local_params))
        for storage in ("card", "host"):
            one, other = ([(p.parts, p.float32, p.layer) for p in t if p.storage == storage] for t in (theirs, ours))
            assert one == other


def test_latent_attention_of_a_rank_holds_rows_in_the_order_of_hugging_face():
    config = family_config("deepseek_v3")  # 4 heads of 12 + 8 and 12 + 10, a latent of 16 + 8, one of queries of 24
    rows = {
        param.name.removeprefix("decoder.layers.0.self_attention."): [(part.name, part.region) for part in param.parts]
        for param in megatron.local_params(config, Parallel(2, tp=2), 1)
        if param.name.startswith("decoder.layers.0.self_attention.")
    }
    hf = "model.layers.0.self_attn."
    assert rows == {
        "linear_q_down_proj.weight": [(f"{hf}q_a_proj.weight", ((12, 24), (0, 32)))],
        "q_layernorm.weight": [(f"{hf}q_a_layernorm.weight", ((0, 24),))],
        "linear_q_up_proj.weight": [(f"{hf}q_b_proj.weight", ((40, 80), (0, 24)))],
        "linear_kv_down_proj.weight": [(f"{hf}kv_a_proj_with_mqa.weight", ((12, 24), (0, 32)))],
        "kv_layernorm.weight": [(f"{hf}kv_a_layernorm.weight", ((0, 16),))],
        "linear_kv_up_proj.weight": [(f"{hf}kv_b_proj.weight", ((44, 88), (0, 16)))],
        "linear_proj.weight": [(f"{hf}o_proj.weight", ((0, 32), (20, 40)))],
    }


def test_a_stage_holds_its_layers_of_either_kind_and_the_correction_biases_of_all():
    config = family_config("deepseek_v3", num_nextn_predict_layers=1)  # three dense layers, then a sparse one
    tables = [{p.name: p for p in megatron.local_params(config, Parallel(3, pp=3), rank)} for rank in range(3)]
    dense = [[name for name in table if name.endswith("mlp.linear_fc1.weight")] for table in tables]
    assert [len(names) for names in dense] == [2, 1, 0]
    biases = [[name for name in table if name.endswith("router.expert_bias")] for table in tables]
    assert biases == [["layers.3.router.expert_bias"]] * 2 + [["decoder.layers.0.mlp.router.expert_bias"]]
    assert "decoder.layers.0.mlp.shared_experts.linear_fc2.weight" in tables[2]
    hosts = [{p.storage for p in table.values() if p.name.startswith("layers.4.")} for table in tables]
    assert hosts == [set(), set(), {"host"}]


def test_more_tensor_ranks_than_groups_cut_a_group():
    config = tiny_config(num_key_value_heads=1)  # q q q q k v, of 16 rows each
    names = [
        [(part.name.split(".")[-2], part.region[0]) for part in param.parts]
        for rank in range(4)
        for param in megatron.local_params(config, Parallel(4, tp=4), rank)
        if param.name == "decoder.layers.0.self_attention.linear_qkv.weight"
    ]
    assert names == [
        [("q_proj", (0, 24))],
        [("q_proj", (24, 48))],
        [("q_proj", (48, 64)), ("k_proj", (0, 8))],
        [("k_proj", (8, 16)), ("v_proj", (0, 16))],
    ]


@pytest.mark.parametrize(
    ("config", "tp", "rows"),
    [
        (tiny_config(num_attention_heads=3, num_key_value_heads=1), 3, "80 rows of linear_qkv"),
        (family_config("deepseek_v3", q_lora_rank=18), 4, r"18 rows of linear_q_down_proj \(q_lora_rank\)"),
        (family_config("deepseek_v3", qk_rope_head_dim=6), 4, r"22 rows of linear_kv_down_proj \(kv_lora_rank \+ "),
    ],
    ids=["qkv", "queries", "latents"],
)
def test_rows_that_megatron_cannot_cut_are_refused(config, tp, rows):
    with pytest.raises(ValueError, match=f"tp={tp} does not divide the {rows}"):
        megatron.local_params(config, Parallel(tp, tp=tp), 0)
