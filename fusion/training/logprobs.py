"""Compute log-probability and entropy from logits whose vocabulary is split over TP, in one collective.

Every rank reduces its columns to four numbers per row, where m is the largest logit:

    m,   s = Σ e^(x-m),   u = Σ e^(x-m) (x-m),   the target's x (0 if another rank has the target)

These are gathered; then log Z = M + log S and the entropy is log S - U / S. The vocabulary-parallel cross-entropy is
that of Megatron-LM (arXiv 1909.08053, section 3), here with the entropy in the same pass. Computed in float32 for any
dtype of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fusion.model import Mesh


def vocab_parallel_logprobs(
    logits_nVl: torch.Tensor, targets_n: torch.Tensor, mesh: Mesh, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probabilities and entropies, float32 [n], from this TP rank's columns of the logits [n, V / tp] and
    int64 targets [n].

    Both carry gradients and are the same on all TP ranks. The distribution is that at ``temperature``.
    """
    return _Logprobs.apply(logits_nVl, targets_n, mesh, temperature)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, mesh: Mesh, temperature: float):
        x = _scaled(logits, temperature)
        local = targets - mesh.tp_rank * x.shape[1]
        here = (local >= 0) & (local < x.shape[1])
        local = local.where(here, 0).unsqueeze(1)
        target = x.gather(1, local).squeeze(1).where(here, 0.0)
        peak = x.amax(dim=1)
        shifted = x - peak.unsqueeze(1)
        exp = shifted.exp()
        stats = torch.stack([peak, exp.sum(1), (exp * shifted).sum(1), target])
        all_peak, total, moment, target = _combine(stats, mesh)
        log_total = total.log()
        log_z, entropy = all_peak + log_total, log_total - moment / total
        ctx.save_for_backward(logits, local, here, log_z, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return target - log_z, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None):
        logits, local, here, log_z, entropy = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        logp = _scaled(logits, ctx.temperature) - log_z.unsqueeze(1)
        p = logp.exp()
        grad = torch.zeros_like(p)
        if grad_logprob is not None:
            grad.addcmul_(p, grad_logprob.unsqueeze(1), value=-1)
            grad.scatter_add_(1, local, (grad_logprob * here).unsqueeze(1))
        if grad_entropy is not None:
            grad.addcmul_(p * (logp + entropy.unsqueeze(1)), grad_entropy.unsqueeze(1), value=-1)
        return (grad / ctx.temperature).to(logits.dtype), None, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    x = logits.to(torch.float32)
    return x if temperature == 1.0 else x / temperature


def _combine(stats_4n: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine (m, s, u, target) of every TP rank's columns to those of the whole row."""
    if mesh.tp_group is None or stats_4n.shape[1] == 0:
        peak, total, moment, target = stats_4n
        return peak, total, moment, target
    wire = stats_4n.new_empty(mesh.parallel.tp * 4, stats_4n.shape[1])
    dist.all_gather_into_tensor(wire, stats_4n, group=mesh.tp_group)
    peaks, totals, moments, targets = wire.view(-1, 4, stats_4n.shape[1]).unbind(1)
    peak = peaks.amax(0)
    scale = (peaks - peak).exp()
    return peak, (scale * totals).sum(0), (scale * (moments + totals * (peaks - peak))).sum(0), targets.sum(0)
