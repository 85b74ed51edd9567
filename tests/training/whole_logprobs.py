"""The formula of log-probabilities over whole logits [n, V] of one rank, which tiles of them are compared with."""

from __future__ import annotations

from typing import Any

import torch

from fusion.model import Head
from fusion.training.batch import KeptIds
from fusion.training.logprobs import TokenLogprobs
from fusion.training.segments import Segments, owners


def whole_logprobs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    kept: KeptIds | None = None,
    with_mass: bool = False,
) -> TokenLogprobs:
    """As `vocab_parallel_logprobs` on one rank, by autograd through logits that are kept for the backward pass."""
    removed: list[torch.Tensor] = []
    logits = head.logits_of(hidden, head.blocks, range(head.num_ids), removed)
    masked = removed[0] if removed and with_mass else None
    return TokenLogprobs(*_Whole.apply(logits, targets, temperature, kept, masked))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        kept: KeptIds | None,
        masked: torch.Tensor | None,
    ):
        x = _scaled(logits, temperature)
        target = x.gather(1, targets.unsqueeze(1)).squeeze(1)
        peak = x.amax(dim=1)
        exp = (x - peak.unsqueeze(1)).exp()
        log_z, entropy = _of_sums(peak, exp.sum(1), (exp * (x - peak.unsqueeze(1))).sum(1))
        masked_mass = None if masked is None else (_scaled(masked, temperature).logsumexp(1) - log_z).sigmoid()
        whole = row = column = mass = None
        if kept is not None:
            whole, row, column = (part.to(x.device) for part in (kept.counts == 0, owners(kept.counts), kept.ids))
            values = x[row, column]
            peak = x.new_full((len(x),), torch.finfo(x.dtype).min).scatter_reduce(0, row, values, "amax")
            exp, of_rows = (values - peak[row]).exp(), Segments(kept.counts, x.device)
            sums = of_rows.sums(exp), of_rows.sums(exp * (values - peak[row]))
            kept_log_z, kept_entropy = _of_sums(peak, *sums)
            mass = (kept_log_z - log_z).exp().where(~whole, 1.0)
            log_z, entropy = log_z.where(whole, kept_log_z), entropy.where(whole, kept_entropy)
        ctx.save_for_backward(logits, targets, log_z, entropy, whole, row, column)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(*(value for value in (mass, masked_mass) if value is not None))
        ctx.set_materialize_grads(False)
        return target - log_z, entropy, mass, masked_mass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None):
        logits, targets, log_z, entropy, whole, row, column = ctx.saved_tensors
        grad_logprob, grad_entropy, *_ = grads
        logp = _scaled(logits, ctx.temperature) - log_z.unsqueeze(1)
        p = logp.exp()
        if whole is not None:
            inside = whole.unsqueeze(1).repeat(1, p.shape[1])
            inside[row, column] = True
            p = p.where(inside, 0.0)
        grad = torch.zeros_like(p)
        if grad_logprob is not None:
            grad.addcmul_(p, grad_logprob.unsqueeze(1), value=-1)
            grad.scatter_add_(1, targets.unsqueeze(1), grad_logprob.unsqueeze(1))
        if grad_entropy is not None:
            grad.addcmul_(p * (logp + entropy.unsqueeze(1)), grad_entropy.unsqueeze(1), value=-1)
        return (grad / ctx.temperature).to(logits.dtype), None, None, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    x = logits.to(torch.float32)
    return x if temperature == 1.0 else x / temperature


def _of_sums(peak: torch.Tensor, total: torch.Tensor, moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_total = total.log()
    return peak + log_total, log_total - moment / total
