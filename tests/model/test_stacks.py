"""Where a card multiplies stacks, the equal matrices of a layer's experts lie in one unit, and compute the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.model import Buckets, Mesh, ModelConfig, PackedAttention, Parallel, Transformer, load_weights, plan_units
from fusion.model.bucket_plan import plan_buckets
from fusion.model.formats import STACKED
from fusion.model.table import local_params
from fusion.npu import open_device
from tests.helpers import tiny_checkpoint, tiny_config
from tests.stacked import Stacked

LENGTHS = [5, 1, 9]


@pytest.fixture(scope="module", autouse=True)
def first_card_again():
    """A card of its own, as others open the first one with another capacity."""
    yield
    torch.npu.set_device(0)


@given(
    ep=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([12, 16, 24]),
    max_bytes=st.sampled_from([64, 4096, 1 << 20]),
)
def test_a_stack_is_one_unit_and_a_view_of_all_its_matrices(ep, width, max_bytes):
    config = tiny_config(num_experts=8, moe_intermediate_size=width)
    table = local_params(config, Parallel(ep, ep=ep), 0, max_bytes // 4, stacks=True)
    plain = {param.name: param.parts for param in local_params(config, Parallel(ep, ep=ep), 0)}
    experts = [param for param in table if param.expert]
    assert all(param.parts == plain[param.name] for param in experts), "whole, and no other parts than without stacks"
    units = plan_units(table, 4, max_bytes)
    for unit in units:
        stacks = {param.stack for param, _ in unit.entries}
        assert len(stacks) == 1
        if stacks != {None}:
            assert len(unit.entries) == 8 // ep
    weights = Buckets(units, open_device("emulated", index=6), torch.float32, owner="weights")
    names = {param.stack for param in experts}
    assert weights.stacks.keys() == names
    for name in names:
        (stack,) = weights.stacks[name]
        members = [param for param in experts if param.stack == name]
        for index, param in enumerate(members):
            weights.views[param.name].fill_(index + 1)
            assert stack[index].shape == param.shape and (stack[index] == index + 1).all()


@given(bucket=st.sampled_from([1 << 10, 1 << 12, 5000, 1 << 20]), width=st.sampled_from([12, 16]))
def test_runs_of_gradients_are_views_of_a_stacks_matrices_in_order(bucket, width):
    """Gradients lie expert after expert, in buckets that end anywhere."""
    config = tiny_config(num_experts=8, moe_intermediate_size=width)
    table = local_params(config, Parallel(), 0, stacks=True)
    plans = plan_buckets(table, Parallel(), 4, bucket)
    gradients = Buckets(plans, open_device("emulated", index=6), torch.float32, owner="gradients")
    for name, runs in gradients.stacks.items():
        for index, view in enumerate(view for run in runs for view in run):
            view.fill_(index + 1)
        members = [param.name for param in table if param.stack == name]
        assert [gradients.views[member].unique().tolist() for member in members] == [[n + 1] for n in range(8)]
        assert bucket < 1 << 20 or len(runs) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_stacks_computes_the_same_to_the_bit(tmp_path, dtype):
    folder, logits = tiny_checkpoint(str(tmp_path)), []
    for operators in (None, Stacked()):
        device = open_device("emulated", index=6)
        device.operators = operators or device.operators
        model = Transformer(ModelConfig.from_hf(folder), Mesh.single(), device, dtype, bucket_bytes=1 << 18)
        assert (model.format == STACKED) == (operators is not None)
        load_weights(model, folder)
        ids = torch.arange(sum(LENGTHS), device=device.torch_device) % 32
        positions = torch.cat([torch.arange(n) for n in LENGTHS]).to(device.torch_device)
        attend = PackedAttention(LENGTHS, model.operators)
        logits.append(model.head.logits(model(ids, positions, attend)).detach().cpu())
    assert torch.equal(*logits)
