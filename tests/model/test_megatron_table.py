"""The invariants of `fusion.model.formats.megatron`, over random layouts; no megatron-core needed."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusion.model import Parallel, global_params
from fusion.model.formats import megatron
from tests.helpers import tiny_config

CONFIGS = [tiny_config(tie_word_embeddings=False), tiny_config(), tiny_config(experts=False)]
SIZES = st.sampled_from([1, 2, 4])


@settings(max_examples=40)
@given(st.sampled_from(CONFIGS), SIZES, SIZES, st.sampled_from([1, 2]), SIZES, st.sampled_from([1, 2]))
def test_parts_cover_every_global_tensor_and_tile_every_local_one(config, tp, ep, pp, etp, replicas):
    assume(config.num_experts or ep == etp == 1)
    stage = max(tp, ep * etp) * replicas
    parallel = Parallel(stage * pp, tp, ep, pp, etp)
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


def test_stages_that_megatron_cannot_cut_are_refused():
    with pytest.raises(ValueError, match="pp=4 does not divide num_hidden_layers=2"):
        megatron.local_params(CONFIGS[0], Parallel(4, pp=4), 0)
    rows = r"tp=3 does not divide the 80 rows of linear_qkv"
    with pytest.raises(ValueError, match=rows):
        megatron.local_params(tiny_config(num_attention_heads=3, num_key_value_heads=1), Parallel(3, tp=3), 0)
