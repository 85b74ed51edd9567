from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fusion.model import Mesh, Parallel, Transformer, local_params, unit_bytes
from fusion.offload import StreamedStates
from fusion.training import ShardedAdamW
from tests.helpers import run_ranks, tiny_config

RATES = [3e-3, 1e-2, 1e-3]
BUCKET = 20000


def make(device: Any, mesh: Mesh, dtype: torch.dtype = torch.float32, **options: Any) -> ShardedAdamW:
    """An optimizer over several buckets of a small model with random weights (the same on every rank)."""
    model = Transformer(tiny_config(), mesh, device, dtype, bucket_bytes=BUCKET)
    fill(model.weights.views, seed=0, scale=0.1)
    return ShardedAdamW(model, **{"betas": (0.8, 0.9), "weight_decay": 0.3} | options)


def fill(views: dict[str, torch.Tensor], seed: int, scale: float) -> None:
    random = torch.Generator().manual_seed(seed)
    for _, view in sorted(views.items()):
        view.copy_(scale * torch.randn(view.shape, generator=random))


def reference(
    clip_grad: float = 0.0, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same steps by torch.optim.AdamW on fp32 tensors, matrices (or blocks of them) and vectors in groups of their
    own."""
    table = local_params(tiny_config(), Parallel(), 0, unit_bytes(BUCKET) // dtype.itemsize)
    views = {param.name: torch.empty(param.shape) for param in table}
    fill(views, seed=0, scale=0.1)
    params = {name: torch.nn.Parameter(view.to(dtype).float()) for name, view in views.items()}
    matrices = [p for p in params.values() if p.dim() > 1]
    vectors = [p for p in params.values() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, norms = torch.optim.AdamW(groups, betas=(0.8, 0.9)), []
    for step, lr in enumerate(RATES):
        gradients = {name: torch.empty(p.shape) for name, p in params.items()}
        fill(gradients, seed=step + 1, scale=1.0)
        for name, param in params.items():
            param.grad = gradients[name]
        norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), clip_grad or float("inf"))))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}, norms


def steps(optimizer: ShardedAdamW, share: float = 1.0) -> list[float]:
    norms = []
    for step, lr in enumerate(RATES):
        fill(optimizer.gradients.views, seed=step + 1, scale=share)
        norms.append(optimizer.step(lr))
    return norms


def same(weights: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(weights[name].cpu(), tensor, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("clip_grad", [0.0, 5.0])
def test_equal_to_torch_adamw(device, clip_grad):
    optimizer = make(device, Mesh.single(), clip_grad=clip_grad)
    norms = steps(optimizer)
    wanted, wanted_norms = reference(clip_grad)
    assert norms == pytest.approx(wanted_norms, rel=1e-6)
    assert min(norms) > 5.0
    same(optimizer.weights.views, wanted)
    assert not any(flat.any() for flat in optimizer.gradients.flats)


def sharded(rank, device, world):
    optimizer = make(device, Mesh.create(Parallel(world)), clip_grad=5.0)
    norms = steps(optimizer, share=1 / world)  # the ranks' gradients are summed
    held = sum(tensor.numel() for tensor in optimizer.tensors().values())
    return norms, {name: view.cpu() for name, view in optimizer.weights.views.items()}, held


def test_states_sharded_over_replicas_give_the_same(device):
    wanted, wanted_norms = reference(clip_grad=5.0)
    results = run_ranks(sharded, 2, 2)
    elements = sum(plan.numel for plan in make(device, Mesh.single()).gradients.plans)
    for norms, weights, held in results:
        assert norms == pytest.approx(wanted_norms, rel=1e-6)
        same(weights, wanted)
        assert held == elements  # two moments, of which each of two ranks holds a half


def test_bf16_weights_are_rounded_masters(device):
    optimizer = make(device, Mesh.single(), torch.bfloat16)
    steps(optimizer)
    wanted, _ = reference(dtype=torch.bfloat16)
    masters = {name: flat for name, flat in optimizer.tensors().items() if name.startswith("master")}
    assert len(masters) == len(optimizer.gradients.plans) and all(m.dtype == torch.float32 for m in masters.values())
    for index, plan in enumerate(optimizer.gradients.plans):
        for param, offset in plan.entries:
            master = masters[f"master.{index}"][offset : offset + param.numel].view(param.shape)
            weight = optimizer.weights.views[param.name]
            assert weight.dtype == torch.bfloat16 and torch.equal(weight, master.bfloat16())
            torch.testing.assert_close(master.cpu(), wanted[param.name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_may_leave_and_return(device, dtype):
    stays, travels = make(device, Mesh.single(), dtype), make(device, Mesh.single(), dtype)
    for step, lr in enumerate(RATES):
        for optimizer in (stays, travels):
            fill(optimizer.gradients.views, seed=step, scale=1.0)
            optimizer.step(lr)
        before = device.memory_by_owner()["optimizer"]
        host = {name: tensor.cpu().clone() for name, tensor in travels.tensors().items()}
        for tensor in travels.tensors().values():
            tensor.untyped_storage().resize_(0)
        left = sum(tensor.nbytes for tensor in travels.tensors().values())
        assert before - device.memory_by_owner()["optimizer"] >= left
        with device.owner("optimizer"):
            for name, tensor in travels.tensors().items():
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.copy_(host[name])
    for left, right in zip(stays.weights.flats, travels.weights.flats, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_streamed_from_the_host_give_the_same_and_two_buckets_are_in_hbm(device, dtype):
    in_hbm: list[int] = []

    class Watched(StreamedStates):
        def __iter__(self):
            for group in super().__iter__():
                in_hbm.append(device.memory_by_owner()["optimizer"] - resident)
                yield group

    def before_update() -> None:
        assert streams.gradients.flats[0].any()
        in_hbm.append(device.memory_by_owner()["optimizer"] - resident)
        assert in_hbm[-1] == 0

    stays = make(device, Mesh.single(), dtype)
    resident = device.memory_by_owner()["optimizer"]
    streams = make(device, Mesh.single(), dtype, states=Watched)
    for step, lr in enumerate(RATES):
        for optimizer in (stays, streams):
            fill(optimizer.gradients.views, seed=step, scale=1.0)
        stays.step(lr)
        streams.step(lr, before_update)
    kinds = 2 if dtype == torch.float32 else 3
    bucket = kinds * max(plan.numel for plan in streams.gradients.plans) * 4
    rounding = 2 * kinds * 512  # of the allocator
    assert len(streams.shards) > 4 and in_hbm.count(0) == len(RATES) and max(in_hbm) <= 2 * bucket + rounding
    for left, right in zip(stays.weights.flats, streams.weights.flats, strict=True):
        assert torch.equal(left, right)
    held = streams.tensors()
    assert held.keys() == stays.tensors().keys()
    for name, tensor in stays.tensors().items():
        assert held[name].device.type == "cpu" and torch.equal(held[name], tensor.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted_until_the_next_update(device, dtype):
    optimizer, spared = (make(device, Mesh.single(), dtype, clip_grad=1.0) for _ in range(2))
    for step, bad in enumerate([[], ["inf"], ["nan", "-inf"], []]):
        for skipped, value in enumerate(bad, start=1):
            fill(optimizer.gradients.views, seed=99, scale=1.0)
            optimizer.gradients.flats[0][3] = float(value)
            assert not math.isfinite(optimizer.step(1e-3)) and optimizer.skipped_in_a_row == skipped
            assert not any(flat.any() for flat in optimizer.gradients.flats)
        for one in (optimizer, spared):
            fill(one.gradients.views, seed=step, scale=1.0)
            one.step(1e-3)
        assert optimizer.skipped_in_a_row == 0 and optimizer.steps == spared.steps == step + 1
    for left, right in zip(optimizer.weights.flats, spared.weights.flats, strict=True):
        assert torch.equal(left, right)
    for name, tensor in spared.tensors().items():
        assert torch.equal(optimizer.tensors()[name], tensor)
