"""Bytes on paper are the bytes of the plan that is carried out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.presets import load_shape
from fusion.costmodel.segments import Side
from fusion.costmodel.shape import Shape
from fusion.costmodel.traffic import switch_traffic
from fusion.ep_switch import Layout, Topology, plan_switch
from fusion.ep_switch.topology import LEVELS
from fusion.model import Parallel, local_params
from tests.costmodel.test_shape import NAMES, SHAPES, layouts
from tests.ep_switch.oracle import sent_bytes
from tests.families import KINDS, MLA, family_config
from tests.helpers import tiny_config

CONFIG = tiny_config(
    num_hidden_layers=3,
    hidden_size=64,
    moe_intermediate_size=64,
    vocab_size=128,
    num_experts=16,
    num_attention_heads=8,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
TIED = tiny_config(experts=False, num_hidden_layers=4, hidden_size=64, intermediate_size=64, num_attention_heads=8)
FAMILIES = [family_config(kind, num_attention_heads=8, num_key_value_heads=8 if kind in MLA else 2) for kind in KINDS]
TOPOLOGIES = [Topology.single_node(), Topology(2, 4, 8, (8, 4, 2, 1)), Topology(2, 4, 8, (4, 4, 2, 1))]
UNIT = 1 << 14


@st.composite
def switches(draw):
    config = draw(st.sampled_from([CONFIG, TIED, *FAMILIES]))
    source, target = draw(layouts(config)), draw(layouts(config))
    first = draw(st.sampled_from([0, 0, 4]))
    return config, source, target, first, draw(st.sampled_from(TOPOLOGIES))


def both(config, source, target, first, topology):
    """What is estimated, and the plan of the same switch."""
    ends = (source, range(source.world)), (target, range(first, first + target.world))
    layouts = [Layout(config, grid, tuple(ranks), torch.bfloat16, UNIT) for grid, ranks in ends]
    shape = Shape("tiny", config)
    paper = switch_traffic(shape, Side(source), Side(target, first), topology)
    return paper, plan_switch(*layouts, UNIT, topology)


def received_by_rank(plan, dies: int) -> np.ndarray:
    """[level, rank] bytes."""
    found = np.zeros((len(LEVELS), dies))
    for rank in plan.ranks:
        found[:, rank] = list(plan.received_bytes(rank).values())
    return found


@settings(max_examples=20)
@given(switches())
@example((CONFIG, Parallel(4, 4, etp=2), Parallel(1), 0, TOPOLOGIES[2]))  # unequal shares over links of equal speed
def test_every_rank_receives_what_the_plan_sends_it(case):
    paper, plan = both(*case)
    received = received_by_rank(plan, paper.received.shape[1])
    assert np.array_equal(np.rint(paper.received.sum(0)), received.sum(0))
    assert np.allclose(paper.sent.sum(1), paper.received.sum(1)), "what is sent at a level is received at it"


@settings(max_examples=20)
@given(switches())
def test_slow_links_carry_no_more_than_any_plan_must_send_over_them(case):
    paper, plan = both(*case)
    received = received_by_rank(plan, paper.received.shape[1])
    for speed_class in range(1, len(plan.topology.classes)):
        slow = [level for levels in plan.topology.classes[speed_class:] for level in levels]
        assert paper.received[slow].sum() <= received[slow].sum() + 1


PAIRS = [
    (Parallel(16, 2, 2, 2), Parallel(16, 1, 16)),
    (Parallel(16, 4, 4), Parallel(16, 2, 8)),
    (Parallel(8, 2, 2, 2), Parallel(8, 1, 8)),
    (Parallel(8, 1, 8), Parallel(8, 2, 4, 1, 2)),
    (Parallel(12, 2, 2, 3), Parallel(12, 4, 4)),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_the_busiest_sender_is_that_of_the_plan(pair):
    for source, target in (pair, pair[::-1]):
        paper, plan = both(CONFIG, source, target, 0, Topology.single_node())
        sent = sent_bytes(plan)
        busiest = max(sum(sent[rank, level] for level in LEVELS) for rank in plan.ranks)
        assert paper.sent.sum(0).max() == pytest.approx(busiest, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_at_768_dies_every_byte_is_held_or_received(name):
    shape = load_shape(name, SHAPES).shape
    train_ep, infer_ep = (max(1, min(most, shape.config.num_experts)) for most in (8, 128))
    source, target = Parallel(768, 4, train_ep, 16), Parallel(768, 2, infer_ep)
    paper = switch_traffic(shape, Side(source), Side(target), hardware_named("ascend_910c").topology)
    for rank in (0, 1, 47, 48, 400, 767):
        table = local_params(shape.config, target, rank)
        needed = sum(2 * param.numel for param in table if param.storage == "unit")
        assert paper.kept[rank] + paper.received[:, rank].sum() == pytest.approx(needed, abs=1)
    assert paper.sent.sum() == pytest.approx(paper.received.sum())
    assert not paper.received[3].any(), "nothing leaves the supernode"


def test_equal_layouts_move_nothing():
    shape, grid = Shape("tiny", CONFIG), Parallel(16, 2, 4, 2)
    paper = switch_traffic(shape, Side(grid), Side(grid), hardware_named("ascend_910c").topology)
    assert paper.total == 0 and not paper.copied.any()


def test_a_segment_enters_a_supernode_once_and_is_fanned_out_inside():
    """Four dies train in TP1; four others, in a supernode of their own, take all of it."""
    shape, topology = Shape("tiny", TIED), Topology(1, 2, 4, (100, 100, 100, 1))
    paper = switch_traffic(shape, Side(Parallel(4)), Side(Parallel(4), 4), topology)
    whole = 2 * shape.numel
    assert paper.received[3].sum() == pytest.approx(whole)
    assert paper.received.sum(0)[4:] == pytest.approx(whole)
    assert paper.sent[:3, :4].sum() == 0 and paper.sent[3, :4] == pytest.approx(whole / 4)
