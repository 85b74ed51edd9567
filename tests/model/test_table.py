"""The invariant of `fusion.model.table` and those of `fusion.model.bucket_plan`, over random layouts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.model import Parallel, global_params, local_params, plan_buckets, plan_units
from tests.helpers import tiny_config

LAYOUTS = [
    Parallel(pp * tp * dp, tp, ep, pp, etp)
    for pp in (1, 2)
    for tp in (1, 2, 4)
    for dp in (1, 2, 4)
    for ep in (1, 2, 4, 8)
    for etp in (1, 2)
    if tp * dp % (ep * etp) == 0
]
CONFIGS = [tiny_config(), tiny_config(tie_word_embeddings=False), tiny_config(experts=False)]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_table_names_what_transformers_saves(config, tmp_path):
    from safetensors import safe_open

    from tests.helpers import tiny_checkpoint

    tiny_checkpoint(tmp_path, experts=config.num_experts > 0, tie_word_embeddings=config.tie_embeddings)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert saved == global_params(config)


@given(st.sampled_from(LAYOUTS), st.sampled_from(CONFIGS), st.sampled_from([None, 100, 700]))
def test_parts_cover_every_global_tensor_and_tile_every_local_one(parallel, config, max_numel):
    if config.num_experts == 0 and parallel.ep * parallel.etp > 1:
        return
    covered = {name: np.zeros(shape, int) for name, shape in global_params(config).items()}
    for rank in range(parallel.world):
        for param in local_params(config, parallel, rank, max_numel):
            assert max_numel is None or param.numel <= max_numel or len(param.shape) == 1
            tiled = np.zeros(param.shape, int)
            for part in param.parts:
                covered[part.name][tuple(slice(*span) for span in part.region)] += 1
                tiled[tuple(slice(*span) for span in part.local)] += 1
                assert tuple(stop - start for start, stop in part.local) == part.shape
            assert (tiled == 1).all(), param.name
    for name, count in covered.items():
        assert (count >= 1).all(), name
        replicas = parallel.edp if ".experts." in name else parallel.stage_world
        ends = 2 if name == "model.embed_tokens.weight" and config.tie_embeddings and parallel.pp > 1 else 1
        assert count.max() <= replicas * ends


@given(st.sampled_from(LAYOUTS), st.integers(64, 1 << 16), st.sampled_from([2, 4]))
def test_buckets_hold_every_parameter_once_aligned_and_divide_over_replicas(parallel, bucket_bytes, itemsize):
    table = local_params(CONFIGS[0], parallel, 0)
    plans = plan_buckets(table, parallel, itemsize, bucket_bytes)
    placed = [param.name for plan in plans for param, _ in plan.entries]
    assert sorted(placed) == sorted(param.name for param in table)
    for plan in plans:
        assert plan.numel % (parallel.edp if plan.expert else parallel.dp) == 0
        assert all(param.expert == plan.expert for param, _ in plan.entries)
        end = 0
        for param, offset in plan.entries:
            assert offset % 16 == 0 and offset >= end
            end = offset + param.numel
        assert end <= plan.numel
        assert len(plan.entries) == 1 or end * itemsize <= bucket_bytes


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.integers(600, 1 << 14))
def test_units_are_small_hold_everything_once_and_are_equal_where_slices_are(one, other, bucket_bytes):
    config = CONFIGS[1]
    tables = {}
    for parallel in (one, other):
        for rank in range(parallel.world):
            table = local_params(config, parallel, rank, bucket_bytes // 4)
            units = plan_units(table, 4, bucket_bytes)
            assert sorted(p.name for unit in units for p, _ in unit.entries) == sorted(p.name for p in table)
            for unit in units:
                assert unit.numel * 4 <= bucket_bytes
                assert len({p.name.split(".")[1] for p, _ in unit.entries if p.name.startswith("layers")}) <= 1
                end = 0
                for param, offset in unit.entries:
                    assert offset % 16 == 0 and offset >= end
                    end = offset + param.numel
                assert end == unit.numel
            tables[parallel, rank] = units

    def experts(units):
        return {p: unit for unit in units if unit.expert for p, _ in unit.entries}

    for left, right in zip(tables.values(), reversed(tables.values()), strict=True):
        mine, theirs = experts(left), experts(right)
        assert all(mine[param].entries == theirs[param].entries for param in mine.keys() & theirs.keys())


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_the_grid_is_a_grid(parallel):
    for axis in ("tp", "dp", "ep", "edp", "etp", "pp"):
        size = getattr(parallel, axis)
        groups = parallel.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(parallel.world))
        for group in groups:
            assert [parallel.coordinate(axis, rank) for rank in group] == list(range(size))


@pytest.mark.parametrize(
    ("parallel", "config", "message"),
    [
        (Parallel(3, tp=3), CONFIGS[0], "parallel.train.tp=3 does not divide the model's num_attention_heads=4"),
        (Parallel(16, ep=16), CONFIGS[0], "parallel.train.ep=16 does not divide the model's num_experts=8"),
        (Parallel(2, ep=2), CONFIGS[2], "parallel.train.ep=2 needs experts, but the model is dense"),
        (Parallel(3, etp=3), CONFIGS[0], "parallel.train.etp=3 does not divide the model's moe_intermediate_size=32"),
        (Parallel(4, pp=4), CONFIGS[0], "parallel.train.pp=4 exceeds the model's num_hidden_layers=2"),
    ],
)
def test_a_layout_that_does_not_divide_says_both_numbers(parallel, config, message):
    with pytest.raises(ValueError, match=message):
        parallel.check(config, "parallel.train")


def test_sizes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match="tp=3 does not divide the 4 ranks"):
        Parallel(4, tp=3)


def test_stages_share_the_layers_evenly_and_early_ones_take_the_remainder():
    assert [len(Parallel(8, pp=8).layers(61, stage)) for stage in range(8)] == [8, 8, 8, 8, 8, 7, 7, 7]
    assert [i for stage in range(8) for i in Parallel(8, pp=8).layers(61, stage)] == list(range(61))
