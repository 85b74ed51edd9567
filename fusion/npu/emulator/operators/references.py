"""State what each operator computes: from PyTorch's operators, in float32, rounded once to the operator's dtype.

The meaning is that of the operators' pages (op-plugin, `docs/zh/custom_APIs`) and of the results that their published
tests expect (`test/test_custom_ops`). Parameters have the schemas' names; those that no caller uses are left out, so
that a call with one raises."""

import torch
from torch import Tensor

from fusion.npu.emulator.operators.attention_references import wide


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    x = wide(self)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return (x * rstd * wide(gamma)).to(self.dtype), rstd


def npu_rms_norm_backward(dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    normed, scaled = wide(self) * rstd, wide(dy) * wide(gamma)
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    dgamma = (wide(dy) * normed).flatten(0, -1 - gamma.dim()).sum(0)
    return dx.to(self.dtype), dgamma


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    x = x1 + x2
    y, rstd = npu_rms_norm(x, gamma, epsilon)
    return y, rstd, x


def _turn(x: Tensor, rotary_mode: str) -> Tensor:
    if rotary_mode == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)
    assert rotary_mode == "interleave", rotary_mode
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    x = wide(self)
    return (x * wide(r1) + _turn(x, rotary_mode) * wide(r2)).to(self.dtype)


def npu_rotary_mul_backward(grad: Tensor, self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"):
    dy, x = wide(grad), wide(self)
    dx = dy * wide(r1) - _turn(dy * wide(r2), rotary_mode)
    dr1, dr2 = (dy * x).sum_to_size(r1.shape), (dy * _turn(x, rotary_mode)).sum_to_size(r2.shape)
    return tuple(one.to(self.dtype) for one in (dx, dr1, dr2))


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, up = wide(self).chunk(2, dim=dim)
    return (gate * gate.sigmoid() * up).to(self.dtype)


def npu_swiglu_backward(grad_output: Tensor, self: Tensor, dim: int = -1) -> Tensor:
    gate, up = wide(self).chunk(2, dim=dim)
    dy, sigmoid = wide(grad_output), gate.sigmoid()
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([dgate, dy * gate * sigmoid], dim=dim).to(self.dtype)


def npu_moe_gating_top_k_softmax_v2(x: Tensor, *, k: int = 1, renorm: int | None = 0) -> tuple[Tensor, Tensor, Tensor]:
    largest, experts = _first(wide(x), k)
    weights = largest.softmax(-1) if renorm else wide(x).softmax(-1).gather(-1, experts)
    return weights.to(x.dtype), experts.to(torch.int32), x.new_empty(0, dtype=torch.float32)


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = wide(x).softmax(-1) if norm_type == 0 else wide(x).sigmoid()
    chosen_by = scores if bias is None else scores + wide(bias)
    if group_count > 1:
        by_group = chosen_by.unflatten(-1, (group_count, -1))
        group_scores = by_group.topk(2 if group_select_mode == 1 else 1, dim=-1).values.sum(-1)
        _, groups = _first(group_scores, k_group)
        excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, groups, False)
        chosen_by = by_group.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(-2)
    _, experts = _first(chosen_by, k)
    weights = scores.gather(-1, experts)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return weights, experts.to(torch.int32), x.new_empty(x.shape, dtype=torch.float32)


def _first(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest and their places; of equal ones the first."""
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], places[..., :k]


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    active_expert_range: list[int] | tuple = (),
    quant_mode: int = -1,
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert expert_idx.dtype == torch.int32 and active_num in (-1, 0, expert_idx.numel())
    assert (quant_mode, row_idx_type) == (-1, 0) and 0 <= active_expert_range[0] < active_expert_range[1] <= expert_num
    assert expert_tokens_num_flag and expert_tokens_num_type == 1
    start, num_active = active_expert_range[0], active_expert_range[1] - active_expert_range[0]
    flat = (expert_idx.flatten().to(torch.int64) - start) % expert_num  # those out of range behind the others
    is_active, sorted_rows = flat < num_active, flat.argsort(stable=True)
    place = torch.empty_like(sorted_rows)
    place.index_copy_(0, sorted_rows, torch.arange(len(flat), device=x.device))
    counts = torch.zeros(expert_num, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(sorted_rows))
    rows = x.index_select(0, sorted_rows // expert_idx.shape[1])
    rows.masked_fill_(~is_active.index_select(0, sorted_rows).unsqueeze(1), torch.nan)  # undefined
    place = place.where(is_active, -1).to(torch.int32)
    return rows, place, counts[:num_active].clone(), x.new_empty(len(flat), dtype=torch.float32)


def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor, sorted_indices: Tensor, tokens_size_0: int, tokens_dtype: torch.dtype, num_topK: int
) -> Tensor:
    grad = wide(grad_permuted_tokens).index_select(0, sorted_indices)
    return grad.view(tokens_size_0, num_topK, -1).sum(1).to(tokens_dtype)


def npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None) -> Tensor:
    rows = wide(permuted_tokens).index_select(0, sorted_indices)
    if probs is not None:
        rows = (rows.unflatten(0, probs.shape) * wide(probs).unsqueeze(-1)).sum(1)
    return rows.to(permuted_tokens.dtype)


def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor, grad_unpermuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    assert probs is not None
    grad = wide(grad_unpermuted_tokens).unsqueeze(1)
    rows = wide(permuted_tokens).index_select(0, sorted_indices).unflatten(0, probs.shape)
    grad_rows = torch.empty_like(permuted_tokens)
    grad_rows.index_copy_(
        0, sorted_indices.long(), (grad * wide(probs).unsqueeze(-1)).flatten(0, 1).to(grad_rows.dtype)
    )
    return grad_rows, (grad * rows).sum(-1).to(probs.dtype)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
) -> list[Tensor]:
    assert split_item in (2, 3) and group_list_type == int(len(group_list) > 1), "counts, of one group its end"
    (x0,) = x
    counts = group_list.tolist() if group_list.device.type != "meta" else [0] * len(group_list)
    if group_type == 0:
        weights = weight if len(weight) > 1 or weight[0].dim() == 2 else weight[0].unbind(0)
        out = x0.new_full((x0.shape[0], weights[0].shape[1]), torch.nan)  # undefined behind the last group
        for rows, y, one in zip(
            x0[: sum(counts)].split(counts), out[: sum(counts)].split(counts), weights, strict=True
        ):
            y.copy_(wide(rows) @ wide(one))
        return [out]
    assert group_type == 2, group_type
    (right,) = weight
    out = x0.new_empty(len(counts), x0.shape[0], right.shape[1])
    for y, columns, rows in zip(out, x0.split(counts, dim=1), right.split(counts), strict=True):
        y.copy_(wide(columns) @ wide(rows))
    return [out]


def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
) -> Tensor:
    x, y = (wide(one).permute(order or (0, 1, 2)) for one, order in ((input, perm_x1), (weight, perm_x2)))
    return (x @ y).permute(perm_y or (1, 0, 2)).to(input.dtype).contiguous()


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: None = None,
    amsgrad: bool | None = None,
    maximize: bool | None = None,
    *,
    var: Tensor,
    m: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    assert not amsgrad and not maximize
    gradient = wide(grad)
    m.lerp_(gradient.to(m.dtype), 1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (wide(v) / (1 - beta2_power * beta2)).sqrt() + epsilon
    step = lr / (1 - beta1_power * beta1)
    var.copy_(wide(var) * (1 - lr * weight_decay) - step * wide(m) / denominator)
    return var, m, v
