from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.model import LocalParam, Parallel, local_params, plan_buckets
from fusion.model.adapters import Adapters
from fusion.training.shards import Piece, SharedElements, boxes_of_run, shard_pieces, shard_range
from tests.helpers import tiny_config

PARAMS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from(["dense", "tp", "expert"])),
    min_size=1,
    max_size=12,
)


@given(PARAMS, st.integers(1, 4), st.integers(40, 400))
def test_pieces_cover_every_parameter_once_and_no_padding(params, tp_and_ep, bucket_bytes):
    table = [
        LocalParam(f"p{i}", tuple(shape), (), expert=kind == "expert", tp_sharded=kind == "tp")
        for i, (shape, kind) in enumerate(params)
    ]
    parallel = Parallel(4 * tp_and_ep, tp_and_ep, 2)
    for plan in plan_buckets(table, parallel, 4, bucket_bytes):
        replicas = parallel.edp if plan.expert else parallel.dp
        owned = [0] * plan.numel
        end = 0
        for replica in range(replicas):
            start, stop = shard_range(plan, replicas, replica)
            assert start == end
            end = stop
            last = 0
            for piece in shard_pieces(plan, start, stop):
                offset = dict(plan.entries)[piece.param]
                assert piece.at >= last and 0 <= piece.start < piece.stop <= piece.param.numel
                assert start + piece.at == offset + piece.start
                last = piece.at + piece.numel
                assert last <= stop - start
                for element in range(offset + piece.start, offset + piece.stop):
                    owned[element] += 1
        assert end == plan.numel
        for param, offset in plan.entries:
            assert owned[offset : offset + param.numel] == [1] * param.numel
        assert sum(owned) == sum(param.numel for param, _ in plan.entries)


Element = tuple[str, int, int]


def elements_of(param: LocalParam) -> list[Element]:
    """The element of the model that each element of a flattened local tensor is."""
    found: dict[int, Element] = {}
    width = param.numel // param.shape[0]
    for part in param.parts:
        columns = part.region[1] if len(part.region) > 1 else (0, 1)
        for row in range(*part.local[0]):
            for column in range(width):
                global_row = row - part.local[0][0] + part.region[0][0]
                found[row * width + column] = (part.name, global_row, columns[0] + column)
    return [found[i] for i in range(param.numel)]


@settings(max_examples=25)
@given(
    st.booleans(),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 200, 1000]),
    st.integers(1, 3),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(["tp", "etp"]),
)
def test_ranks_that_share_an_element_meet_in_one_place_and_count_it_once(
    experts, tp, pp, max_numel, replicas, lora_rank, axis
):
    """Also an adapter's, of which one side is whole on every rank. ``axis``: etp: of experts that are split."""
    experts |= axis == "etp"
    moe = {"num_experts": 2, "moe_intermediate_size": 8} if experts else {}
    config = tiny_config(experts, hidden_size=8, num_attention_heads=8, head_dim=4, vocab_size=16, **moe)
    config = replace(config, adapters=Adapters(lora_rank, 2.0) if lora_rank else None)
    parallel = Parallel(tp * pp * replicas, tp, pp=pp, etp=tp if axis == "etp" else 1)
    group, num_replicas = parallel.groups(axis)[-1], parallel.edp if axis == "etp" else parallel.dp
    tables = [[one for one in local_params(config, parallel, rank, max_numel) if one.trained] for rank in group]
    counted: Counter[Element] = Counter()
    held: defaultdict[Element, set[int]] = defaultdict(set)
    places: defaultdict[tuple[int, int], set[Element]] = defaultdict(set)
    at: defaultdict[Element, set[tuple[int, int]]] = defaultdict(set)
    lengths = set()
    for tp_rank, table in enumerate(tables):
        shared = SharedElements(tables, tp_rank, expert=axis == "etp")
        plans = [plan for plan in plan_buckets(table, parallel, 4, 3000) if plan.expert == (axis == "etp")]
        wires = [shared.wire(plan) for plan in plans]
        lengths.add(tuple(wire.numel for wire in wires))
        for bucket, (plan, wire) in enumerate(zip(plans, wires, strict=True)):
            for param, _ in plan.entries:
                for element in elements_of(param):
                    held[element].add(tp_rank)
            for piece in wire.pieces:
                for i, element in enumerate(elements_of(piece.param)[piece.start : piece.stop]):
                    places[bucket, piece.at + i].add(element)
                    at[element].add((bucket, piece.at + i))
            for replica in range(num_replicas):
                for piece in shard_pieces(plan, *shard_range(plan, num_replicas, replica)):
                    for start, stop in shared.counted(piece):
                        first = piece.start + start - piece.at
                        counted.update(elements_of(piece.param)[first : first + stop - start])
    assert len(lengths) == 1
    assert all(len(elements) == 1 for elements in places.values()) and all(len(found) == 1 for found in at.values())
    assert at.keys() == {element for element, ranks in held.items() if len(ranks) > 1}
    assert len(places) == sum(next(iter(lengths)))
    assert counted.keys() == held.keys() and set(counted.values()) == {1}


def test_every_rank_counts_its_own_experts():
    config = tiny_config()
    table = local_params(config, Parallel(2, tp=2), 1)
    param = next(param for param in table if param.expert)
    piece = Piece(param, 8, 24, 100)
    assert SharedElements([table, table], 1).counted(piece) == [(100, 116)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=3), st.data())
def test_the_boxes_of_a_run_are_its_elements_in_order(sides, data):
    region = tuple((start, start + size) for start, size in sides)
    elements = list(product(*(range(*side) for side in region)))
    first = data.draw(st.integers(0, len(elements) - 1))
    last = data.draw(st.integers(first + 1, len(elements)))
    boxes = list(boxes_of_run(region, first, last))
    assert [element for box in boxes for element in product(*(range(*side) for side in box))] == elements[first:last]
    assert len(boxes) <= 2 * len(region) - 1
