"""The invariant of `fusion.model.table` and those of `fusion.model.bucket_plan`, over random layouts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.model import Buckets, LocalParam, Parallel, Part, global_params, local_params, plan_buckets, plan_units
from fusion.model.formats import MEGATRON, local_table
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
                assert len({(p.layer, p.expert_index) for p, _ in unit.entries}) == 1
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


@given(st.sampled_from(LAYOUTS), st.sampled_from(CONFIGS), st.sampled_from([None, 100]))
def test_fields_of_a_row_say_which_layer_and_expert_its_global_tensors_belong_to(parallel, config, max_numel):
    if config.num_experts == 0 and parallel.ep * parallel.etp > 1:
        return
    for rank in range(parallel.world):
        for param in local_params(config, parallel, rank, max_numel):
            for part in param.parts:
                words = part.name.split(".")
                assert param.layer == (int(words[2]) if words[1] == "layers" else None)
                assert param.expert_index == (int(words[words.index("experts") + 1]) if "experts" in words else None)
                assert param.expert == (param.expert_index is not None)


@st.composite
def stacked_params(draw):
    """A local tensor whose rows, or the matrices of a stack, are boxes of global matrices, some transposed."""
    stack, columns, parts, end = draw(st.booleans()), draw(st.integers(1, 4)), [], 0
    rows = draw(st.integers(1, 5))
    for index in range(draw(st.integers(1, 4))):
        transposed, height = draw(st.booleans()), rows if stack else draw(st.integers(1, 5))
        first, other = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        region = ((first, first + height), (other, other + columns))
        local = ((index, index + 1), (0, height), (0, columns)) if stack else ((end, end + height), (0, columns))
        parts.append(Part(f"w{index}", region[::-1] if transposed else region, local, transposed))
        end += 1 if stack else height
    shape = (end, rows, columns) if stack else (end, columns)
    return LocalParam("p", shape, tuple(parts))


@given(stacked_params(), st.integers(1, 30))
def test_blocks_of_a_tensor_hold_its_elements_in_order_also_where_it_is_stored_transposed(param, max_numel):
    globals_ = {part.name: np.arange(64).reshape(8, 8) + 100 * i for i, part in enumerate(param.parts)}

    def filled(block):
        local = np.full(block.shape, -1)
        for part in block.parts:
            box = globals_[part.name][tuple(slice(*span) for span in part.region)]
            place = local[tuple(slice(*span) for span in part.local)]
            place[...] = (box.T if part.transposed else box).reshape(place.shape)
        return local

    blocks = param.cut(max_numel)
    assert (np.concatenate([filled(block) for block in blocks]) == filled(param)).all()
    assert filled(param).min() >= 0
    row = param.numel // param.shape[0]
    assert all(block.numel <= max(max_numel, row) for block in blocks)


def megatron(config, parallel, rank):
    return local_table(MEGATRON, config, parallel, rank, max_bytes=1 << 20, itemsize=4)


@pytest.mark.parametrize("parallel", [Parallel(1), Parallel(4, tp=2, ep=2), Parallel(4, pp=2, ep=2)])
def test_formats_that_hold_the_same_slices_hold_units_of_equal_content(parallel):
    config = tiny_config(tie_word_embeddings=False, num_key_value_heads=4)
    for rank in range(parallel.world):
        contents = []
        for table in (local_params(config, parallel, rank), megatron(config, parallel, rank)):
            units = plan_units(table, 4, 1 << 20)
            contents.append({unit.content: {param.name for param, _ in unit.entries} for unit in units})
        shared = {name for content in contents[0].keys() & contents[1].keys() for name in contents[0][content]}
        own = {name for names in contents[0].values() for name in names}
        assert {name.rsplit(".", 1)[-1] for name in own - shared} == {"qkv", "out"}


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
        (
            Parallel(3, tp=3),
            CONFIGS[0],
            "parallel.train.tp=3 does not divide the model's num_attention_heads=4: expected one of 1",
        ),
        (
            Parallel(16, ep=16),
            CONFIGS[0],
            "parallel.train.ep=16 does not divide the model's num_experts=8: expected one of 1, 2, 4, 8",
        ),
        (Parallel(2, ep=2), CONFIGS[2], "parallel.train.ep=2 needs experts, but the model is dense"),
        (Parallel(3, etp=3), CONFIGS[0], "parallel.train.etp=3 does not divide the model's moe_intermediate_size=32"),
        (Parallel(4, pp=4), CONFIGS[0], "parallel.train.pp=4 exceeds the model's num_hidden_layers=2"),
    ],
)
def test_a_layout_that_does_not_divide_says_both_numbers(parallel, config, message):
    with pytest.raises(ValueError, match=message):
        parallel.check(config, "parallel.train")


@given(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_context_parallel_ranks_are_neighbours_that_share_a_replica(pp, tp, cp, replicas):
    parallel = Parallel(pp * tp * cp * replicas, tp=tp, pp=pp, cp=cp)
    assert (parallel.replicas, parallel.dp) == (replicas, cp * replicas)
    for group in parallel.groups("cp"):
        assert [parallel.coordinate("cp", rank) for rank in group] == list(range(cp))
        assert {second - first for first, second in zip(group, group[1:], strict=False)} <= {tp}
        assert len({parallel.coordinate("replica", rank) for rank in group}) == 1
    for rank in range(parallel.world):
        place = parallel.coordinate("replica", rank) * cp + parallel.coordinate("cp", rank)
        assert place == parallel.coordinate("dp", rank)


@given(st.sampled_from([1, 2]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]))
def test_ranks_that_share_kv_are_neighbours_that_hold_the_same_heads(pp, heads, dcp, dp):
    parallel = Parallel(pp * heads * dcp * dp, tp=heads * dcp, pp=pp, dcp=dcp)
    config = tiny_config(num_attention_heads=24, num_key_value_heads=heads)
    assert parallel.misfit(config) is None or "dcp" not in parallel.misfit(config)
    assert sorted(rank for group in parallel.groups("dcp") for rank in group) == list(range(parallel.world))
    for group in parallel.groups("dcp"):
        assert [parallel.coordinate("dcp", rank) for rank in group] == list(range(dcp))
        assert [*group] == list(range(group[0], group[0] + dcp))
        own = {config.num_kv_heads * parallel.coordinate("tp", rank) // parallel.tp for rank in group}
        assert len(own) == 1 == len({parallel.coordinate("dp", rank) for rank in group}), "one key head, one schedule"


def test_sizes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match="tp=3 does not divide the 4 ranks"):
        Parallel(4, tp=3)


def test_stages_share_the_layers_evenly_and_early_ones_take_the_remainder():
    assert [len(Parallel(8, pp=8).layers(61, stage)) for stage in range(8)] == [8, 8, 8, 8, 8, 7, 7, 7]
    assert [i for stage in range(8) for i in Parallel(8, pp=8).layers(61, stage)] == list(range(61))


def test_padding_is_zero_whenever_its_memory_is_new(device):
    table = (
        LocalParam("p", (4, 6), (Part("w", ((0, 3), (0, 5)), ((0, 3), (0, 5))),)),
        LocalParam("padding", (32,), ()),
    )
    assert [param.holes for param in table] == [(((3, 4), (0, 6)), ((0, 3), (5, 6))), (((0, 32),),)]
    weights = Buckets(plan_units(table, 4, 1 << 10), device, torch.float32, owner="weights")
    for _ in range(3):
        matrix, padding = weights.views["p"], weights.views["padding"]
        assert not padding.any() and not matrix[3].any() and not matrix[:, 5].any()
        for flat in weights.flats:
            flat.fill_(7.0)
        weights.release()
        weights.allocate()
