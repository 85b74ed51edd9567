"""State what the operators compute that send rows to their experts' ranks and back: by all-to-alls in their group.

What dispatch passes to combine is opaque, as the pages say: here the rows of each (local expert, source), as cumulative
sums. Rows behind those that have arrived are undefined."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from fusion.npu.emulator.operators.attention_references import wide


def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    shared_expert_num: int = 1,
    global_bs: int = 0,
) -> tuple[Tensor, ...]:
    top_k, local = expert_ids.shape[1], moe_expert_num // ep_world_size
    assert expert_ids.dtype == torch.int32 and 0 < len(x) <= global_bs // ep_world_size and shared_expert_num == 0
    sent_E = _rows_of_experts(expert_ids, moe_expert_num)
    arriving_E = torch.empty_like(sent_E)
    dist.all_to_all_single(arriving_E, sent_E, group=_resolve_process_group(GroupName(group_ep)))
    arriving = arriving_E.view(ep_world_size, local)
    send, receive = sent_E.view(ep_world_size, local).sum(1).tolist(), arriving.sum(1).tolist()
    order = expert_ids.flatten().argsort(stable=True)
    arrived = _exchange(x.index_select(0, order // top_k), send, receive, group=group_ep)
    expert_of_row = torch.arange(local, device=x.device).repeat(ep_world_size).repeat_interleave(arriving_E)
    expanded = x.new_full((global_bs * min(local, top_k), x.shape[1]), torch.nan)
    expanded[: len(arrived)] = arrived.index_select(0, expert_of_row.argsort(stable=True))
    received = arriving.t().flatten().cumsum(0, dtype=torch.int32)
    none = x.new_empty(0, dtype=torch.float32)
    assist = x.new_empty(len(expanded) * 128, dtype=torch.int32)
    return expanded, none, assist, arriving.sum(0), received, none.to(torch.int32), none.clone()


def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    shared_expert_num: int = 1,
    global_bs: int = 0,
) -> Tensor:
    assert expert_scales.dtype == torch.float32 and shared_expert_num == 0
    local = moe_expert_num // ep_world_size
    counts = ep_send_counts.diff(prepend=ep_send_counts.new_zeros(1)).long()
    source_of_row = torch.arange(ep_world_size, device=expand_x.device).repeat(local).repeat_interleave(counts)
    by_source = expand_x[: len(source_of_row)].index_select(0, source_of_row.argsort(stable=True))
    own = _rows_of_experts(expert_ids, moe_expert_num).view(ep_world_size, local).sum(1).tolist()
    returned = _exchange(by_source, counts.view(local, ep_world_size).sum(0).tolist(), own, group=group_ep)
    rows = torch.empty_like(returned).index_copy_(0, expert_ids.flatten().argsort(stable=True), returned)
    return (wide(rows.unflatten(0, expert_ids.shape)) * expert_scales.unsqueeze(-1)).sum(1).to(expand_x.dtype)


def _rows_of_experts(expert_ids: Tensor, num_experts: int) -> Tensor:
    flat = expert_ids.flatten().long()
    return flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    out = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=_resolve_process_group(GroupName(group)))
    return out
