from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.model import Mesh, Parallel, Transformer, local_params
from fusion.training import ShardedAdamW
from tests.helpers import run_ranks, tiny_config

RATES = [3e-3, 1e-2, 1e-3]


def make(device: Any, mesh: Mesh, dtype: torch.dtype = torch.float32, **options: Any) -> ShardedAdamW:
    """An optimizer over several buckets of a small model with random weights (the same on every rank)."""
    weights = Transformer(tiny_config(), mesh, device, dtype, bucket_bytes=20000).weights
    fill(weights.views, seed=0, scale=0.1)
    return ShardedAdamW(weights, mesh, device, **{"betas": (0.8, 0.9), "weight_decay": 0.3} | options)


def fill(views: dict[str, torch.Tensor], seed: int, scale: float) -> None:
    random = torch.Generator().manual_seed(seed)
    for view in views.values():
        view.copy_(scale * torch.randn(view.shape, generator=random))


def reference(
    clip_grad: float = 0.0, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same steps by torch.optim.AdamW on whole fp32 tensors, matrices and vectors in groups of their own."""
    views = {param.name: torch.empty(param.shape) for param in local_params(tiny_config(), Parallel(), 0)}
    # `fill` draws in the order of the buckets' views: dense first, then experts.
    views = dict(sorted(views.items(), key=lambda item: ".moe.gate_up" in item[0] or ".moe.down" in item[0]))
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
    elements = sum(plan.numel for plan in make(device, Mesh.single()).weights.plans)
    for norms, weights, held in results:
        assert norms == pytest.approx(wanted_norms, rel=1e-6)
        same(weights, wanted)
        assert held == elements  # two moments, of which each of two ranks holds a half


def test_bf16_weights_are_rounded_masters(device):
    optimizer = make(device, Mesh.single(), torch.bfloat16)
    steps(optimizer)
    wanted, _ = reference(dtype=torch.bfloat16)
    masters = {name: flat for name, flat in optimizer.tensors().items() if name.startswith("master")}
    assert len(masters) == len(optimizer.weights.plans) and all(m.dtype == torch.float32 for m in masters.values())
    for index, (plan, flat) in enumerate(optimizer.weights):
        assert flat.dtype == torch.bfloat16
        assert torch.equal(flat, masters[f"master.{index}"].bfloat16())
        for param, offset in plan.entries:
            master = masters[f"master.{index}"][offset : offset + param.numel].view(param.shape)
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


def test_a_gradient_that_is_not_finite_changes_nothing(device):
    optimizer = make(device, Mesh.single(), clip_grad=1.0)
    before = [flat.clone() for flat in optimizer.weights.flats]
    optimizer.gradients.flats[0][3] = float("inf")
    with pytest.raises(FloatingPointError, match="optimizer step 0: the norm of the gradient is inf"):
        optimizer.step(1e-3)
    assert optimizer.steps == 0
    assert all(torch.equal(flat, old) for flat, old in zip(optimizer.weights.flats, before, strict=True))
