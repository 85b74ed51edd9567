"""Routing as a column, and passes whose experts are imposed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fusion.model import (
    Mesh,
    ModelConfig,
    PackedAttention,
    Replay,
    Transformer,
    load_weights,
    routing_dtype,
    routing_of,
)
from fusion.model.replay import Forced
from tests.helpers import tiny_checkpoint

LENGTHS = [1, 2, 7, 7, 11]
ROWS = sum(LENGTHS)


def loaded(folder, device, dtype=torch.float64, **changes):
    path = tiny_checkpoint(folder, **changes)
    model = Transformer(ModelConfig.from_hf(path), Mesh.single(), device, dtype)
    load_weights(model, path)
    return model


def run(model, routed=None, replay=None):
    ids = torch.randint(32, (ROWS,), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    place = model.device.torch_device
    return model(ids.to(place), positions.to(place), PackedAttention(LENGTHS, model.operators), routed, replay=replay)


def random_experts(rows, layers, experts=8, k=2, seed=1):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(rows, layers, experts, generator=random).topk(k).indices.to(routing_dtype(experts))


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(2, torch.uint8), (256, torch.uint8), (257, torch.int16), (1 << 15, torch.int16), (32769, torch.int32)],
)
def test_a_column_is_of_the_smallest_dtype(experts, dtype):
    assert routing_dtype(experts) is dtype
    assert torch.tensor([experts - 1]).to(dtype).item() == experts - 1


@pytest.mark.parametrize("recompute", [False, True])
def test_replaying_a_models_own_routing_changes_no_bit(tmp_path, device, recompute):
    model = loaded(tmp_path, device, torch.float32)
    model.recompute = recompute
    found = []
    replay = None
    for _ in range(2):
        routed = []
        out = run(model, routed, replay)
        model.zero_grad()
        out.square().sum().backward()
        found.append([out.detach().clone()] + [p.grad.clone() for p in model.parameters() if p.grad is not None])
        experts = routing_of(routed, ROWS, model.mesh, 8).cpu()
        assert experts.dtype is torch.uint8 and experts.shape == (ROWS, 2, 2)
        place = device.torch_device
        replay = Replay(experts.to(place), torch.ones(ROWS, dtype=torch.bool, device=place))
    assert not any(layer.mismatched_n.any() for layer in routed)
    assert len(found[0]) == len(found[1]) > 10
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


@pytest.mark.parametrize("normalised", [True, False])
def test_forced_experts_are_weighed_by_the_models_own_router_with_gradients(tmp_path, device, normalised):
    model = loaded(tmp_path, device, norm_topk_prob=normalised)
    moe, place = model.layers["0"].moe, device.torch_device
    x = (
        torch.randn(ROWS, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        .to(place)
        .requires_grad_()
    )
    known = torch.arange(ROWS, device=place) % 5 != 4
    experts = random_experts(ROWS, 1)[:, 0].to(place)
    forced = Forced(experts.long(), known.unsqueeze(1))
    inputs = [x, moe.router, *(matrix for expert in moe.experts.values() for matrix in (expert.gate_up, expert.down))]

    def plain(x):
        """Every expert on every row, then the k that count."""
        probs = F.linear(x, moe.router).softmax(-1, dtype=torch.float32)
        chosen = experts.long().where(known.unsqueeze(1), probs.topk(2).indices)
        weight = probs.gather(1, chosen)
        weight = weight / weight.sum(-1, keepdim=True) if normalised else weight
        every = []
        for expert in moe.experts.values():
            gate, up = F.linear(x, expert.gate_up).chunk(2, -1)
            every.append(F.linear(F.silu(gate) * up, expert.down))
        picked = torch.stack(every, 1).gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[1]))
        return (picked * weight.unsqueeze(-1).to(x.dtype)).sum(1), chosen

    wanted, chosen = plain(x)
    got, routed = moe(x, 1, forced)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(routed.expert_nk, chosen)
    assert torch.equal(routed.stats[0], chosen.flatten().bincount(minlength=8).float()), "the load there really is"
    probe = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).to(place)
    left, right = (torch.autograd.grad((out * probe).sum(), inputs) for out in (got, wanted))
    for mine, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert left[1].any(), "the router learns"


@given(st.lists(st.tuples(*[st.permutations(range(4))] * 2, st.booleans()), min_size=1, max_size=9))
def test_a_row_is_mismatched_if_its_set_of_experts_differs(rows):
    forced, own = (torch.tensor([row[part][:2] for row in rows]) for part in range(2))
    layer = Forced(forced, torch.tensor([[known] for *_, known in rows]))
    wanted = [known and set(theirs[:2]) != set(mine[:2]) for theirs, mine, known in rows]
    assert layer.mismatched(own).tolist() == wanted
    for row, (theirs, mine, known) in zip(layer.impose(own).tolist(), rows, strict=True):
        assert row == list((theirs if known else mine)[:2])
