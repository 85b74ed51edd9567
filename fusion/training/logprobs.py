"""Compute log-probability and entropy from logits whose vocabulary is split over TP, in one collective.

Every rank reduces its columns to four numbers per row, where m is the largest logit:

    m,   s = Σ e^(x-m),   u = Σ e^(x-m) (x-m),   the target's x (0 if another rank has the target)

These are gathered; then log Z = M + log S and the entropy is log S - U / S. The vocabulary-parallel cross-entropy is
that of Megatron-LM (arXiv 1909.08053, section 3), here with the entropy in the same pass. Computed in float32 for any
dtype of the logits.

Where truncated sampling has kept only some ids of a row, every rank also reduces those in its columns to m, s and u,
which are gathered with the others: log-probability, entropy and gradient are those of the distribution over these ids.
Likewise log Σ e^x of the logits that a model has masked (`IdMask`), for the mass that they would have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusion.model import Mesh, Transformer
from fusion.training.batch import KeptIds, Sequences
from fusion.training.model import TrainedModel


class TokenLogprobs(NamedTuple):
    """Of n tokens, float32 [n]; log-probabilities and entropies carry gradients. ``kept_mass``: probability of the kept
    ids under the whole distribution, 1 where all are kept; None: none were given. ``masked_mass``: probability of the
    masked ids, were they not masked; None: ``removed_nM`` was not given."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    kept_mass: torch.Tensor | None = None
    masked_mass: torch.Tensor | None = None


def vocab_parallel_logprobs(
    logits_nVl: torch.Tensor,
    targets_n: torch.Tensor,
    mesh: Mesh,
    temperature: float = 1.0,
    kept: KeptIds | None = None,
    removed_nM: torch.Tensor | None = None,
) -> TokenLogprobs:
    """Compute log-probabilities and entropies, float32 [n], from this TP rank's columns of the logits [n, V / tp] and
    int64 targets [n].

    Both are the same on all TP ranks. The distribution is that at ``temperature``, over the ``kept`` ids of each token
    (the same on all TP ranks, the target among them); None: over the vocabulary. ``removed_nM``: what was masked of
    these logits, on all TP ranks or none; M may be 0.
    """
    return TokenLogprobs(*_Logprobs.apply(logits_nVl, targets_n, mesh, temperature, kept, removed_nM))


def trained_logprobs(
    model: Transformer | TrainedModel,
    batch: Sequences,
    hidden_ND: torch.Tensor,
    *,
    temperature: float,
    with_mass: bool = False,
) -> TokenLogprobs:
    """Compute those of the trained tokens of a micro-batch, in the order of `Sequences.trained_rows`, from its hidden
    states; ``with_mass`` the mass of masked ids, too. On the last stage."""
    rows, device = batch.trained_rows, hidden_ND.device
    removed: list[torch.Tensor] | None = [] if with_mass else None
    logits_nVl = model.logits(hidden_ND.index_select(0, (rows - 1).to(device)), removed)
    targets_n, kept = batch.tokens[rows].to(device), batch.kept_at(rows)
    return vocab_parallel_logprobs(
        logits_nVl,
        targets_n,
        model.mesh,
        temperature=temperature,
        kept=None if kept is None else kept.to(device),
        removed_nM=removed[0] if removed else None,
    )


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        mesh: Mesh,
        temperature: float,
        kept: KeptIds | None,
        removed: torch.Tensor | None,
    ):
        x = _scaled(logits, temperature)
        local = targets - mesh.tp_rank * x.shape[1]
        here = (local >= 0) & (local < x.shape[1])
        local = local.where(here, 0).unsqueeze(1)
        target = x.gather(1, local).squeeze(1).where(here, 0.0)
        peak = x.amax(dim=1)
        shifted = x - peak.unsqueeze(1)
        exp = shifted.exp()
        stats = [target, peak, exp.sum(1), (exp * shifted).sum(1)]
        row = column = None
        if kept is not None:
            row, column = _cells(kept, mesh, x)
            stats += _sums_of_cells(x, row, column)
        stats += [] if removed is None else [_scaled(removed, temperature).logsumexp(1)]
        stats_Rkn = _gather(torch.stack(stats), mesh)
        target = stats_Rkn[:, 0].sum(0)
        log_z, entropy = _combine(stats_Rkn[:, 1:4])
        masked_mass = None
        if removed is not None:
            masked_mass = (stats_Rkn[:, -1].logsumexp(0) - log_z).sigmoid()
            ctx.mark_non_differentiable(masked_mass)
        whole = mass = None
        if kept is not None:
            whole, (kept_log_z, kept_entropy) = kept.counts == 0, _combine(stats_Rkn[:, 4:7])
            mass = (kept_log_z - log_z).exp().where(~whole, 1.0)
            log_z, entropy = log_z.where(whole, kept_log_z), entropy.where(whole, kept_entropy)
            ctx.mark_non_differentiable(mass)
        ctx.save_for_backward(logits, local, here, log_z, entropy, whole, row, column)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return target - log_z, entropy, mass, masked_mass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None):
        logits, local, here, log_z, entropy, whole, row, column = ctx.saved_tensors
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
            grad.scatter_add_(1, local, (grad_logprob * here).unsqueeze(1))
        if grad_entropy is not None:
            grad.addcmul_(p * (logp + entropy.unsqueeze(1)), grad_entropy.unsqueeze(1), value=-1)
        return (grad / ctx.temperature).to(logits.dtype), None, None, None, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    x = logits.to(torch.float32)
    return x if temperature == 1.0 else x / temperature


def _cells(kept: KeptIds, mesh: Mesh, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of each kept id that is in this rank's columns."""
    column = kept.ids - mesh.tp_rank * x.shape[1]
    here = (column >= 0) & (column < x.shape[1])
    return kept.owners[here], column[here]


def _sums_of_cells(x: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> list[torch.Tensor]:
    """Return (m, s, u) of each row's cells [n]; of a row without any (the smallest number, 0, 0)."""
    values = x[row, column]
    smallest = x.new_full((len(x),), torch.finfo(x.dtype).min)
    peak = smallest.scatter_reduce(0, row, values, "amax")
    shifted = values - peak[row]
    exp = shifted.exp()
    zeros = torch.zeros_like(peak)
    return [peak, zeros.index_add(0, row, exp), zeros.index_add(0, row, exp * shifted)]


def _gather(stats_kn: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Gather the numbers of all TP ranks' columns: [ranks, k, n]."""
    if mesh.tp_group is None or stats_kn.shape[1] == 0:
        return stats_kn.unsqueeze(0)
    wire = stats_kn.new_empty(mesh.parallel.tp * len(stats_kn), stats_kn.shape[1])
    dist.all_gather_into_tensor(wire, stats_kn, group=mesh.tp_group)
    return wire.view(-1, *stats_kn.shape)


def _combine(stats_R3n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine (m, s, u) of every rank's columns to log Z and the entropy of the whole row."""
    peaks, totals, moments = stats_R3n.unbind(1)
    peak, total, moment = peaks[0], totals[0], moments[0]
    if len(stats_R3n) > 1:
        peak = peaks.amax(0)
        scale = (peaks - peak).exp()
        total = (scale * totals).sum(0)
        moment = (scale * (moments + totals * (peaks - peak))).sum(0)
    log_total = total.log()
    return peak + log_total, log_total - moment / total
