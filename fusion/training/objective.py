"""What a global batch minimises, micro-batch by micro-batch, and its metrics.

    last stage    logprobs, entropy of a micro-batch's trained tokens ─ loss ─► Σ / weight of the global batch
    every stage   routing of its layers' rows ─ load-balancing loss ─► its part of the batch's

Invariant: what all ranks and micro-batches add up to is the mean loss over the trained tokens of the global batch
(weighted and normalised where the batch says so) plus the load-balancing loss of all its layers and rows; so are the
metrics, which are weighted means and the same on every rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from fusion.model import Mesh, ModelConfig, Routed, load_balancing_loss
from fusion.training.batch import Sequences
from fusion.training.gaps import gap_metrics, gap_sums
from fusion.training.loss import Loss, LossInput

BALANCE = "actor/load_balancing_loss"
LOSS = "actor/loss"
GAPS = "gaps"

MISMATCH = "training/routing_mismatch"

REPLAYED = "(token, layer)s whose experts are imposed"


class Totals(NamedTuple):
    """Of all data-parallel ranks together: tokens' weights, what divides the losses (`Sequences.loss_totals`) and rows
    summed; micro-batches at most."""

    weight: float
    normaliser: float
    rows: int
    micro_batches: int


class TrainedTokens(NamedTuple):
    """Of one micro-batch: float32 [n] on the device with gradients, and their rows int64 [n] on the CPU."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    rows: torch.Tensor


class Objective:
    """``counts_E``: tokens that each expert gets from the global batch, summed over layers; None: the routing that
    `of_routing` is called with is all there is on this rank."""

    def __init__(
        self,
        loss: Loss,
        totals: Totals,
        config: ModelConfig,
        mesh: Mesh,
        balancing_coef: float,
        counts_E: torch.Tensor | None,
    ):
        self.loss, self.totals, self.config, self.mesh = loss, totals, config, mesh
        self.balancing_coef, self.counts_E = balancing_coef, counts_E
        self._sums: dict[str, torch.Tensor] = {}

    def of_tokens(self, batch: Sequences, tokens: TrainedTokens) -> torch.Tensor:
        """The micro-batch's share of the mean loss: scalar."""
        rows, device = tokens.rows, tokens.logprobs.device

        def column(values_N: torch.Tensor | None) -> torch.Tensor | None:
            return None if values_N is None else values_N[rows].to(device)

        owner = torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.lengths, dtype=torch.int64))
        inputs = LossInput(
            tokens.logprobs,
            tokens.entropy,
            owner[rows].bincount(minlength=len(batch.lengths)).tolist(),
            column(batch.advantages),
            column(batch.behaviour_logprobs),
            column(batch.ref_logprobs),
            column(batch.proximal_logprobs),
            column(batch.versions),
            batch.version,
        )
        out, weight_n = self.loss(inputs), column(batch.token_weight)

        def total(values_n: torch.Tensor) -> torch.Tensor:
            return (values_n if weight_n is None else values_n * weight_n).sum()

        for name, values in out.metrics.items():
            self._add(name, total(values))
        self._add("actor/entropy", total(tokens.entropy.detach()))
        self._add(LOSS, total(out.loss.detach()))
        if inputs.behaviour_logprobs is not None:
            self._add(GAPS, gap_sums(inputs, weight_n))
        return total(out.loss) / max(self.totals.normaliser, 1e-12)

    def of_routing(self, routed: list[Routed]) -> torch.Tensor | None:
        """The share of this stage's layers in the load-balancing loss: scalar, weighted; None where there is none."""
        if not self.balancing_coef:
            return None
        if self.counts_E is None:
            self.counts_E = routing_counts(routed, self.mesh)
        stats = [layer.stats for layer in routed]
        balance = load_balancing_loss(stats, self.counts_E, self.totals.rows * self.config.num_layers)
        self._add(BALANCE, balance.detach())
        return self.balancing_coef * balance

    def of_replay(self, batch: Sequences, routed: list[Routed]) -> None:
        """Counts where this stage's routers would have chosen another set of experts than the one they were given."""
        if batch.routing is None:
            return
        mismatched = torch.stack([layer.num_mismatched for layer in routed if layer.num_mismatched is not None])
        self._add(MISMATCH, mismatched.sum())
        known = batch.rows - len(batch.last_rows())
        self._add(REPLAYED, torch.tensor(float(known * len(routed)), device=mismatched.device))

    def metrics(self) -> dict[str, float]:
        """Means over the global batch. Collective over the mesh, and the same on every rank."""
        sums = _sum_over_stages(self._sum_over_stage(), self.mesh)
        balance, loss, gaps, mismatched, replayed = (
            sums.pop(name, None) for name in (BALANCE, LOSS, GAPS, MISMATCH, REPLAYED)
        )
        weight, means = self.totals.weight, {}
        if weight:
            means = {name: float(value) / weight for name, value in sums.items()}
            means |= {} if loss is None else {LOSS: float(loss) / self.totals.normaliser}
            means |= {} if gaps is None else gap_metrics(gaps)
        if replayed and mismatched is not None:
            means[MISMATCH] = float(mismatched) / float(replayed)
        if balance is not None:
            means[BALANCE] = float(balance)
            means[LOSS] = means.get(LOSS, 0.0) + self.balancing_coef * means[BALANCE]
        return means

    def _add(self, name: str, value: torch.Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _sum_over_stage(self) -> dict[str, torch.Tensor]:
        """Float64 on the CPU, flat."""
        if not self._sums:
            return {}
        values = [value.to(torch.float64).flatten() for value in self._sums.values()]
        sizes = [len(value) for value in values]
        wire = torch.cat(values).cpu()
        if self.mesh.stage_group is not None:
            # Tokens are the same on the ranks of a TP group, which counts them once; the rows its routers see are not.
            of_rows = (BALANCE, MISMATCH)
            mine = torch.tensor([name in of_rows or self.mesh.tp_rank == 0 for name in self._sums])
            wire *= mine.repeat_interleave(torch.tensor(sizes))
            dist.all_reduce(wire, group=self.mesh.stage_group)
        return dict(zip(self._sums, (part.clone() for part in wire.split(sizes)), strict=True))


def routing_counts(routed: list[Routed], mesh: Mesh) -> torch.Tensor:
    """Tokens that went to each expert, float32 [E], summed over ranks and layers. Collective."""
    counts_E = torch.stack([layer.stats[0] for layer in routed]).detach().sum(0)
    if mesh.world_group is not None:
        dist.all_reduce(counts_E, group=mesh.world_group)
    return counts_E


def _sum_over_stages(mine: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Only the last stage knows the metrics of the loss, every stage its layers' balance."""
    if mesh.pp_group is None:
        return mine
    stages: list[dict[str, torch.Tensor]] = [{} for _ in range(mesh.parallel.pp)]
    dist.all_gather_object(stages, mine, group=mesh.pp_group)
    total: dict[str, torch.Tensor] = {}
    for figures in reversed(stages):
        for name, value in figures.items():
            total[name] = total[name] + value if name in total else value
    return total
