"""Rows of the experts: grouped by expert for one grouped product, and back in the order in which they came."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.model import Mesh, ModelConfig, Transformer, load_weights
from fusion.model.exchange import regroup, reorder
from fusion.npu.operators import Plain
from tests.helpers import tiny_checkpoint
from tests.host_reads import HostReads


@st.composite
def counts(draw) -> list[list[int]]:
    """Rows by [source][expert], from none at all."""
    num_experts = draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 5), min_size=num_experts, max_size=num_experts)
    return draw(st.lists(row, min_size=1, max_size=6))


@given(counts())
def test_rows_are_grouped_by_expert_in_the_order_of_their_sources(by_source):
    grouping, back = regroup(np.array(by_source))
    arrived = [(s, e, n) for s, row in enumerate(by_source) for e, rows in enumerate(row) for n in range(rows)]
    assert [arrived[place] for place in grouping.tolist()] == sorted(arrived, key=lambda row: (row[1], row[0], row[2]))
    assert grouping[back].tolist() == back[grouping].tolist() == list(range(len(arrived)))


@given(counts())
def test_reordered_rows_and_their_gradients_are_those_of_an_index(by_source):
    grouping, back = torch.from_numpy(regroup(np.array(by_source)))
    x, other = (torch.randn(len(grouping), 2, generator=torch.manual_seed(1)).requires_grad_() for _ in range(2))
    weights = torch.arange(1.0, len(grouping) + 1).unsqueeze(1)
    found, expected = reorder(x, grouping, back), other[grouping]
    assert torch.equal(found, expected)
    for rows in (found, expected):
        (rows * weights).sum().backward()
    assert torch.equal(x.grad, other.grad)


class Grouped(Plain):
    """A card's kernel, in operations that leave the counts on the card."""

    def takes_counts(self, x, experts, row_multiple=1):
        return True

    def grouped_linear(self, x_ND, weights, counts, row_multiple=1):
        ends, rows = counts.cumsum(0), torch.arange(len(x_ND), device=x_ND.device)
        expert_N = (rows.unsqueeze(1) >= ends).sum(1)
        every_NEO = torch.stack([x_ND @ weight.t() for weight in weights], 1)
        return every_NEO.take_along_dim(expert_N.view(-1, 1, 1), 1).squeeze(1)


def test_with_a_grouped_product_of_the_card_the_host_never_waits_for_counts(tmp_path, device):
    path = tiny_checkpoint(tmp_path)
    model = Transformer(ModelConfig.from_hf(path), Mesh.single(), device, torch.float64)
    load_weights(model, path)
    moe = next(iter(model.layers.values())).moe
    x_nD = torch.randn(13, model.config.hidden_size, dtype=torch.float64).to(device.torch_device)
    with torch.no_grad():
        with HostReads() as reads:
            expected, routed = moe(x_nD, 1)
        assert reads.found, "without one it does, for their counts"
        moe.operators = Grouped()
        with HostReads() as reads:
            found, routed_there = moe(x_nD, 1)
    assert not reads.found
    torch.testing.assert_close(found, expected)
    assert torch.equal(routed_there.stats, routed.stats) and torch.equal(routed_there.expert_nk, routed.expert_nk)
