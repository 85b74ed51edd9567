"""Compute the loss of a global batch, micro-batch by micro-batch, and its metrics.

    last stage    logprobs, entropy of a micro-batch's trained tokens ─ loss ─► sum / weight of the global batch
    every stage   routing of its layers' rows ─ load-balancing loss ─► its share of the batch's

    BatchSums of parts of a batch ─ after ─► those of the batch ─ metrics

Invariant: the sum over all ranks and micro-batches is the mean loss over the trained tokens of the global batch
(weighted and normalised if the batch has weights) plus the load-balancing loss of all its layers and rows. The metrics
are weighted means over the same tokens, equal on every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from fusion.model import Mesh, ModelConfig, Routed, load_balancing_loss
from fusion.model.head import MAX_KEPT_IDS
from fusion.model.moe import sequence_balancing_loss
from fusion.model.shared_rows import Reads
from fusion.npu import to_card
from fusion.npu.all_or_none import gather_json
from fusion.training.batch import Sequences
from fusion.training.gaps import SUMS, gap_metrics, gap_sums
from fusion.training.logprobs import TokenLogprobs
from fusion.training.loss import COLUMNS, Loss, LossInput
from fusion.training.segments import owners

BALANCE = "actor/load_balancing_loss"
LOSS = "actor/loss"

MISMATCH = "training/routing_mismatch"

KEPT_MASS, KEPT_IDS = "training/kept_mass_mean", "training/kept_ids_mean"
KEPT_CAPPED = "training/kept_capped_share"

SHARED = "training/shared_rows_share"
"""Metric: share of the rows that were not computed, as other sequences of the micro-batch have the same prefix"""

REPLAYED = "replayed (token, layer) pairs"


class Totals(NamedTuple):
    """Totals over all data-parallel ranks: the sum of the tokens' weights, the divisor of the losses
    (`Sequences.loss_totals`), the numbers of rows and of sequences, the largest number of micro-batches of a
    rank, and the number of rows that were not computed, as sequences share them."""

    weight: float
    normaliser: float
    rows: int
    sequences: int
    micro_batches: int
    shared: int = 0

    def share_after(self, normaliser: float) -> float:
        """Return the share of these tokens in a batch to which tokens with this ``normaliser`` came before; in (0, 1],
        or 0 if only those count."""
        together = normaliser + self.normaliser
        return self.normaliser / together if together > 0 else 1.0

    def and_then(self, later: "Totals") -> "Totals":
        """Return the totals of these tokens and later ones of the same batch."""
        return Totals(
            self.weight + later.weight,
            self.normaliser + later.normaliser,
            rows=self.rows + later.rows,
            sequences=self.sequences + later.sequences,
            micro_batches=max(self.micro_batches, later.micro_batches),
            shared=self.shared + later.shared,
        )


@dataclass(frozen=True)
class BatchSums:
    """What the metrics of a batch, or of a part of one, are computed from; the same on every rank. ``totals``: of its
    tokens. ``sums``: name → float64, weighted sums over its tokens; scalars, and the flat sums of `gaps`. ``balance``:
    its load-balancing loss; None: there is none."""

    totals: Totals
    sums: dict[str, torch.Tensor]
    balance: float | None = None

    def after(self, earlier: "BatchSums") -> "BatchSums":
        """Return the sums of the batch of which this is the part that follows ``earlier``."""
        share, sums = self.totals.share_after(earlier.totals.normaliser), dict(earlier.sums)
        for name, value in self.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        balances = [loss for loss in (earlier.balance, self.balance) if loss is not None]
        balance = None if not balances else (1 - share) * balances[0] + share * balances[-1]
        return BatchSums(earlier.totals.and_then(self.totals), sums, balance)

    def metrics(self, balancing_coef: float) -> dict[str, float]:
        """Return the means over the batch."""
        sums, weight, means = dict(self.sums), self.totals.weight, dict[str, float]()
        loss, mismatched, replayed = (sums.pop(name, None) for name in (LOSS, MISMATCH, REPLAYED))
        gaps = {name: sums.pop(name) for name in SUMS if name in sums}
        if weight:
            means = {name: float(value) / weight for name, value in sums.items()}
            means |= {} if loss is None else {LOSS: float(loss) / self.totals.normaliser}
            means |= gap_metrics(gaps)
        if self.totals.rows:
            means[SHARED] = self.totals.shared / self.totals.rows
        if replayed and mismatched is not None:
            means[MISMATCH] = float(mismatched) / float(replayed)
        if self.balance is not None:
            means[BALANCE] = self.balance
            means[LOSS] = means.get(LOSS, 0.0) + balancing_coef * means[BALANCE]
        return means


class Objective:
    """Compute each micro-batch's share of the loss and accumulate the metrics.
    ``own_rows``: returns which rows of a batch of so many this rank routes.
    ``by_sequence``: whether to balance each sequence instead of the batch, which needs no ``counts_E``.
    ``counts_E``: tokens that each expert receives from the global batch, summed over layers; None: there is one
        micro-batch and one stage, and `of_routing` counts its routing.
    ``share``: of a larger batch that this one is a part of (`Totals.share_after`): its losses count that much."""

    def __init__(
        self,
        loss: Loss,
        totals: Totals,
        *,
        config: ModelConfig,
        mesh: Mesh,
        balancing_coef: float,
        own_rows: Callable[[int], range] = range,
        by_sequence: bool = False,
        counts_E: torch.Tensor | None,
        share: float = 1.0,
    ):
        self.share = share
        self.loss, self.totals, self.config, self.mesh = loss, totals, config, mesh
        self.balancing_coef, self.counts_E = balancing_coef, counts_E
        self.own_rows, self.by_sequence = own_rows, by_sequence
        self._sums: dict[str, torch.Tensor] = {}

    def of_tokens(self, batch: Sequences, tokens: TokenLogprobs) -> torch.Tensor:
        """Return the micro-batch's share of the mean loss: scalar. ``tokens``: its trained ones, on the device."""
        rows, device = batch.trained_rows, tokens.logprobs.device

        def column(values_N: torch.Tensor | None) -> torch.Tensor | None:
            return None if values_N is None else to_card(values_N[rows], device)

        inputs = LossInput(
            logprobs=tokens.logprobs,
            entropy=tokens.entropy,
            lengths=owners(batch.lengths)[rows].bincount(minlength=len(batch.lengths)).tolist(),
            version=batch.version,
            updated=batch.updated,
            **{name: column(getattr(batch, name)) for name in COLUMNS},
        )
        out, weight_n = self.loss(inputs), column(batch.token_weight)

        def total(values_n: torch.Tensor) -> torch.Tensor:
            return (values_n if weight_n is None else values_n * weight_n).sum()

        for name, values in out.metrics.items():
            self._add(name, total(values))
        self._add("actor/entropy", total(tokens.entropy.detach()))
        self._add(LOSS, total(out.loss.detach()))
        if tokens.kept_mass is not None:
            counts = column(batch.kept_counts)
            assert counts is not None
            self._add(KEPT_MASS, total(tokens.kept_mass))
            self._add(KEPT_IDS, total(counts.to(torch.float32)))
            self._add(KEPT_CAPPED, total((counts >= MAX_KEPT_IDS).to(torch.float32)))
        if tokens.masked_mass is not None:
            self._add("training/masked_mass_mean", total(tokens.masked_mass))
        if inputs.behaviour_logprobs is not None:
            for name, sums in gap_sums(inputs, weight_n).items():
                self._add(name, sums)
        return self._of_share(total(out.loss) / max(self.totals.normaliser, 1e-12))

    def of_routing(self, batch: Sequences, routed: list[Routed]) -> torch.Tensor | None:
        """Return the share of this stage's sparse layers in the load-balancing loss: scalar, weighted; None if there is
        no such loss."""
        if not self.balancing_coef:
            return None
        if self.by_sequence:
            return self._of_sequences(batch, routed)
        if self.counts_E is None:
            device = routed[0].stats.device  # with one stage, which has all sparse layers
            self.counts_E = routing_counts(routed, self.mesh, self.config.num_experts, device)
        if not routed:
            return None
        stats = [layer.stats for layer in routed]
        balance = load_balancing_loss(stats, self.counts_E, self.totals.rows * self.config.num_sparse_layers)
        self._add(BALANCE, balance.detach())
        return self._of_share(self.balancing_coef * balance)

    def _of_sequences(self, batch: Sequences, routed: list[Routed]) -> torch.Tensor | None:
        if not routed:
            return None
        device, own = routed[0].stats.device, self.own_rows(batch.num_computed)
        lengths_S = to_card(torch.tensor(batch.lengths, dtype=torch.float32), device)
        owner_N, layers = owners(batch.lengths), iter(routed)
        if batch.shared is None:
            owner_n = to_card(owner_N[own.start : own.stop], device)
        else:
            row_N = batch.shared.row_N - own.start
            is_own_N = (row_N >= 0) & (row_N < len(own))
            owner_n, reads = to_card(owner_N[is_own_N], device), Reads(row_N[is_own_N], device)
            layers = (layer.read_by(reads) for layer in routed)
        losses = [sequence_balancing_loss(layer, owner_n, lengths_S, self.mesh) for layer in layers]
        balance = torch.stack(losses).sum() / max(self.totals.sequences, 1)
        self._add(BALANCE, balance.detach())
        return self._of_share(self.balancing_coef * balance)

    def of_replay(self, batch: Sequences, routed: list[Routed]) -> None:
        """Count the (row, layer) pairs of this stage for which the router would have chosen other experts than the
        replayed ones."""
        if batch.routing is None or not routed:
            return
        mismatched_Ln = torch.stack([layer.mismatched_n for layer in routed if layer.mismatched_n is not None])
        weighted = mismatched_Ln.to(torch.float32)
        if batch.shared is not None:
            own = self.own_rows(batch.num_computed)
            weighted = weighted * to_card(batch.shared.sequences_M[own.start : own.stop], weighted.device)
        self._add(MISMATCH, weighted.sum())
        num_replayed = (batch.rows - len(batch.last_rows())) * len(routed)
        self._add(REPLAYED, torch.tensor(float(num_replayed), device=weighted.device))

    def sums(self) -> BatchSums:
        """Return the sums over the global batch, the same on every rank. Collective over the mesh."""
        sums = _sum_over_stages(self._sum_over_stage(), self.mesh)
        balance = sums.pop(BALANCE, None)
        return BatchSums(self.totals, sums, None if balance is None else float(balance))

    def _of_share(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.share == 1.0 else self.share * loss

    def _add(self, name: str, value: torch.Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _sum_over_stage(self) -> dict[str, torch.Tensor]:
        """Return the sums over the ranks of this stage, float64 on the CPU, flat."""
        if not self._sums:
            return {}
        values = [value.to(torch.float64).flatten() for value in self._sums.values()]
        sizes = [len(value) for value in values]
        wire = torch.cat(values).cpu()
        if self.mesh.stage_group is not None:
            # The ranks of a replica have the same tokens, which are counted once; each routes rows of its own.
            summed_over_rows, first = (BALANCE, MISMATCH), self.mesh.first_of_replica
            counts_here = torch.tensor([name in summed_over_rows or first for name in self._sums])
            wire *= counts_here.repeat_interleave(torch.tensor(sizes))
            dist.all_reduce(wire, group=self.mesh.stage_group)
        return dict(zip(self._sums, (part.clone() for part in wire.split(sizes)), strict=True))


def routing_counts(routed: list[Routed], mesh: Mesh, num_experts: int, device: torch.device | str) -> torch.Tensor:
    """Return the number of tokens routed to each expert, float32 [E], summed over ranks and layers. Collective."""
    counts = [layer.stats[0] for layer in routed]
    counts_E = torch.stack(counts).detach().sum(0) if counts else torch.zeros(num_experts, device=device)
    if mesh.world_group is not None:
        dist.all_reduce(counts_E, group=mesh.world_group)
    return counts_E


def _sum_over_stages(sums: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Add up the stages' sums: only the last stage has those of the loss, every stage has its layers' balance."""
    if mesh.pp_group is None:
        return sums
    sums_by_stage = gather_json({name: values.tolist() for name, values in sums.items()}, mesh.pp_group)
    total: dict[str, torch.Tensor] = {}
    for stage_sums in reversed(sums_by_stage):
        for name, values in stage_sums.items():
            value = torch.tensor(values, dtype=torch.float64)
            total[name] = total[name] + value if name in total else value
    return total
