"""Layouts: what they say of a rank is what a model built with the same arguments holds there."""

from __future__ import annotations

import re

import pytest
import torch

from fusion.ep_switch import Layout, shared_units
from fusion.ep_switch.fragments import slabs_of
from fusion.model import Buckets, Parallel, local_params, plan_units, unit_bytes
from fusion.model.boxes import intersect, subtract
from fusion.model.formats import EMBEDDED, MEGATRON, STACKED, VLLM_ASCEND, VLLM_CPU
from fusion.npu import open_device
from tests.ep_switch.oracle import choices, random_config, random_layout
from tests.families import KINDS, family_config
from tests.helpers import tiny_config

MOE = tiny_config(num_hidden_layers=3)
TWO_ENGINES = Layout(MOE, Parallel(2, 1, 2), (5, 3, 0, 1), bucket_bytes=1 << 13)


def test_ranks_of_a_layout_are_places_of_its_grid():
    for index, rank in enumerate(TWO_ENGINES.ranks):
        params = local_params(MOE, TWO_ENGINES.parallel, index % 2, max_numel=unit_bytes(1 << 13) // 4)
        assert TWO_ENGINES.units(rank) == plan_units(params, 4, unit_bytes(1 << 13))
        names = {param.name for unit in TWO_ENGINES.units(rank) for param, _ in unit.entries}
        assert names == {param.name for param in params}
        assert TWO_ENGINES.nbytes(rank) == sum(TWO_ENGINES.unit_nbytes(rank)) > 0
    assert TWO_ENGINES.units(2) == () and TWO_ENGINES.places(2) == () and TWO_ENGINES.nbytes(2) == 0
    assert TWO_ENGINES.alike == ((5, 0), (3, 1))


def check_sections(layout: Layout) -> None:
    """Sections are the units themselves, but for the number of the layer in their names."""
    kinds = list(dict.fromkeys(layout.config.layers))
    for rank in layout.ranks:
        units = layout.units(rank)
        sections = list(layout.sections(rank))
        assert layout.unit_nbytes(rank) == tuple(unit.numel * layout.dtype.itemsize for unit in units)
        for unit, (layer, pattern) in zip(units, sections, strict=True):
            assert layer == unit.entries[0][0].layer
            content = repr(unit.content)
            if layer is not None:
                kind = kinds.index(layout.config.layers[layer])
                content = re.sub(rf"model\.layers\.{layer}\.", f"model.layers.{kind}.", content)
            assert repr(pattern.content) == content


@pytest.mark.parametrize("format", [EMBEDDED, STACKED, MEGATRON, VLLM_CPU, VLLM_ASCEND])
def test_sections_are_units_with_the_names_of_their_kind(format):
    for seed in range(20):
        choose = choices(seed)
        check_sections(random_layout(choose, random_config(choose), range(8), 1024, format))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [Parallel(), Parallel(4, 2, 2), Parallel(4, 1, 2, pp=2)], ids=str)
def test_sections_of_every_family(kind, grid):
    check_sections(
        Layout(family_config(kind, num_hidden_layers=5), grid, tuple(range(grid.world)), bucket_bytes=1 << 13)
    )


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 2)])
def test_ranks_fill_whole_grids_once(ranks):
    with pytest.raises(AssertionError):
        Layout(MOE, Parallel(2, 1, 2), ranks)


def test_places_are_where_the_parameters_parts_are():
    layout = Layout(MOE, Parallel(4, 2, 2, etp=2), (0, 1, 2, 3), bucket_bytes=1 << 12)
    device = open_device("emulated", index=0)
    for rank in (0, 3):
        buckets = Buckets(layout.units(rank), device, torch.float32, owner="weights")
        for index, flat in enumerate(buckets.flats):
            flat.copy_(torch.arange(len(flat)) + 1000 * index)
        places = iter(layout.places(rank))
        for unit in layout.units(rank):
            for param, _ in unit.entries:
                for part in param.parts:
                    name, region, place = next(places)
                    assert (name, region) == (part.name, part.region)
                    assert torch.equal(place.view(buckets.flats, part.shape), part.view(buckets.views[param.name]))


@pytest.mark.parametrize("other", [Parallel(4, 1, 4), Parallel(4, 2, 2, etp=2), Parallel(4, 2, pp=2)], ids=str)
def test_units_are_shared_as_their_buckets_share_them(other):
    source, target = (Layout(MOE, grid, (0, 1, 2, 3), bucket_bytes=1 << 13) for grid in (Parallel(4, 2, 2), other))
    device = open_device("emulated", index=0)
    slabs = [{key: dict(slab.owners()) for key, slab in slabs_of(end).items()} for end in (source, target)]
    for rank in source.ranks:
        mine = Buckets(source.units(rank), device, torch.float32, owner="weights", resident=False)
        theirs = Buckets(target.units(rank), device, torch.float32, owner="weights", share=mine, resident=False)
        assert shared_units(source, target, rank) == theirs.shared
        alike = {
            owners[rank]: slabs[0][key][rank]
            for key, owners in slabs[1].items()
            if rank in owners and rank in slabs[0].get(key, ())
        }
        assert alike == theirs.shared
    assert any(shared_units(source, target, rank) for rank in source.ranks)


def test_another_dtype_shares_nothing():
    narrow = Layout(MOE, Parallel(), (0,), torch.bfloat16)
    assert shared_units(Layout(MOE, Parallel(), (0,)), narrow, 0) == {}


def test_boxes():
    box = ((0, 4), (2, 8))
    assert intersect(box, ((4, 5), (2, 8))) is None
    hit = intersect(box, ((1, 9), (0, 5)))
    assert hit == ((1, 4), (2, 5))
    pieces = subtract(box, hit)
    cells = [(i, j) for piece in [hit, *pieces] for i in range(*piece[0]) for j in range(*piece[1])]
    assert sorted(cells) == [(i, j) for i in range(4) for j in range(2, 8)]
