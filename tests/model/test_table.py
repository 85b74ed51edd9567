"""The invariant of `fusion.model.table` and those of `fusion.model.weights`, over random layouts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.model import Parallel, global_params, local_params, plan_buckets
from tests.helpers import tiny_config

LAYOUTS = [Parallel(world, tp, ep) for world in (1, 2, 4, 8) for tp in (1, 2, 4) for ep in (1, 2, 4, 8)
           if tp <= world and ep <= world]  # fmt: skip
CONFIGS = [tiny_config(), tiny_config(tie_word_embeddings=False), tiny_config(experts=False)]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_table_names_what_transformers_saves(config, tmp_path):
    from safetensors import safe_open

    from tests.helpers import tiny_checkpoint

    tiny_checkpoint(tmp_path, experts=config.num_experts > 0, tie_word_embeddings=config.tie_embeddings)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert saved == global_params(config)


@given(st.sampled_from(LAYOUTS), st.sampled_from(CONFIGS))
def test_parts_cover_every_global_tensor_and_tile_every_local_one(parallel, config):
    if config.num_experts == 0 and parallel.ep > 1:
        return
    covered = {name: np.zeros(shape, int) for name, shape in global_params(config).items()}
    for rank in range(parallel.world):
        for param in local_params(config, parallel, rank):
            tiled = np.zeros(param.shape, int)
            for part in param.parts:
                covered[part.name][tuple(slice(*span) for span in part.region)] += 1
                tiled[tuple(slice(*span) for span in part.local)] += 1
                local_sizes = [stop - start for start, stop in part.local]
                assert tuple(local_sizes[len(local_sizes) - len(part.shape) :]) == part.shape
            assert (tiled == 1).all(), param.name
    for name, count in covered.items():
        assert (count >= 1).all(), name
        expected = parallel.edp if ".experts." in name else parallel.world
        assert count.max() <= expected


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


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_the_grid_is_a_grid(parallel):
    for axis, size in (("tp", parallel.tp), ("dp", parallel.dp), ("ep", parallel.ep), ("edp", parallel.edp)):
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
    ],
)
def test_a_layout_that_does_not_divide_says_both_numbers(parallel, config, message):
    with pytest.raises(ValueError, match=message):
        parallel.check(config, "parallel.train")


def test_sizes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match="tp=3 does not divide the 4 ranks"):
        Parallel(4, tp=3)
