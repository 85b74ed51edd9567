"""The trainer of one rank: packed sequences in, gradients and a new policy out.

    sequences ─ plan_micro_batches ─► each: forward ─ trained rows ─ lm head ─ logprobs ─ loss ─ backward ─► gradients
    optimizer_step: gradients ─ ShardedAdamW ─► weights

Invariants: the loss is the mean over the trained tokens of the *global* batch (weighted where the batch says so), so
loss and gradient depend neither on the layout nor on micro-batches nor on packing, but for rounding. All ranks run the
same number of micro-batches, as they meet in the experts' exchange: a rank that has fewer runs empty ones. A hidden
state goes through the lm head only where a log-probability is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusion.model import LocalParam, Mesh, PackedAttention, Parallel, Transformer, load_balancing_loss
from fusion.npu import Device
from fusion.training.algorithms import Loss, LossInput
from fusion.training.batch import Sequences, plan_micro_batches
from fusion.training.config import TrainingConfig
from fusion.training.logprobs import vocab_parallel_logprobs
from fusion.training.optimizer import ShardedAdamW
from fusion.training.schedule import learning_rate


class _Totals(NamedTuple):
    """Of all data-parallel ranks together: loss weight and rows summed, micro-batches at most."""

    weight: float
    rows: int
    micro_batches: int


class TrainEngine:
    """Trains ``model``, whose weights are loaded already (fp32 masters of bf16 weights are taken from them here).

    Args:
        temperature: log-probabilities are those of the distribution at this temperature, the one that was sampled from.
        total_steps: optimizer steps of the run, for the cosine schedule.

    Raises:
        ValueError: TP exceeds the model's key/value heads, or the schedule lacks ``total_steps``.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh,
        device: Device,
        config: TrainingConfig,
        *,
        temperature: float = 1.0,
        total_steps: int | None = None,
    ):
        if mesh.parallel.tp > model.config.num_kv_heads:
            raise ValueError(
                f"parallel.train.tp={mesh.parallel.tp} exceeds the model's "
                f"num_key_value_heads={model.config.num_kv_heads}; training does not replicate key/value heads"
            )
        assert mesh is model.mesh
        self.model, self.mesh, self.device, self.config = model, mesh, device, config
        self.temperature, self.total_steps = temperature, total_steps
        self.learning_rate(config.warmup_steps)
        model.recompute = config.recompute
        coef = config.load_balancing_coef
        self.balancing_coef = model.config.router_aux_coef if coef is None else coef
        if not model.config.num_experts:
            self.balancing_coef = 0.0
        self.optimizer = ShardedAdamW(
            model.weights,
            mesh,
            device,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
        )
        self._accumulated = False
        self._collect_gradients()

    def layout(self) -> Parallel:
        return self.mesh.parallel

    def named_shards(self) -> Iterator[tuple[LocalParam, torch.Tensor]]:
        """This rank's weights: the row of the parameter table, and the tensor in its physical format (a live view)."""
        for param in self.model.table:
            yield param, self.model.weights.views[param.name]

    def learning_rate(self, step: int) -> float:
        """Of optimizer step ``step``, counted from 0."""
        config = self.config
        return learning_rate(step, config.lr, config.schedule, config.warmup_steps, self.total_steps)

    def forward_backward(self, sequences: Sequences, loss: Loss) -> dict[str, float]:
        """Adds the gradient of the mean loss over the global batch to the gradients; returns the batch's metrics.

        Collective over the mesh. ``sequences`` is this data-parallel rank's part (the same on its TP ranks; none is
        allowed). The metrics are the same on every rank: means over the trained tokens of the global batch, and
        `actor/loss`, what was minimised. The load-balancing loss needs the whole batch's routing before its first
        backward pass: with more than one micro-batch a rank, an extra forward pass without gradients finds it.
        """
        batches, totals = self._micro_batches(sequences)
        counts_E = self._routing_counts(batches) if self.balancing_coef and len(batches) > 1 else None
        sums: dict[str, torch.Tensor] = {}
        for batch in batches:
            for name, value in self._backward(batch, loss, totals, counts_E).items():
                sums[name] = sums[name] + value if name in sums else value
        self._accumulated = True
        return self._metrics(sums, totals)

    def optimizer_step(self) -> dict[str, float]:
        """Steps with the gradients summed since the last step. Collective over the mesh.

        Raises:
            FloatingPointError: the gradient is not finite (on all ranks).
        """
        lr = self.learning_rate(self.optimizer.steps)
        norm = self.optimizer.step(lr)
        self._accumulated = False
        return {"actor/grad_norm": norm, "actor/lr": lr}

    @torch.no_grad()
    def logprobs(self, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies float32 [N] on the CPU, in the order of ``sequences``; 0 where loss_mask is
        False.

        Collective over the mesh, as `forward_backward`.
        """
        logprobs_N, entropy_N = torch.zeros(2, len(sequences.tokens))
        plan = plan_micro_batches(sequences.lengths, self.config.token_budget)
        batches, _ = self._micro_batches(sequences, plan)
        places = [sequences.rows_of(indices) for indices in plan]
        for number, batch in enumerate(batches):
            logprobs, entropy, rows = self._forward(batch)
            if number < len(plan):
                logprobs_N[places[number][rows]] = logprobs.cpu()
                entropy_N[places[number][rows]] = entropy.cpu()
        return logprobs_N, entropy_N

    def release_gradients(self) -> None:
        """Gives the gradients' memory back. They must have been used up by `optimizer_step`."""
        assert not self._accumulated, "gradients that no optimizer step has used would be lost"
        self.optimizer.gradients.release()

    def allocate_gradients(self) -> None:
        """Takes the gradients' memory, zeroed."""
        self.optimizer.gradients.allocate()
        self.optimizer.zero_gradients()

    def state_dict(self) -> dict[str, Any]:
        """This rank's weights, optimizer states (live tensors, which must be resident) and step."""
        weights = {f"weights.{index}": flat for index, flat in enumerate(self.model.weights.flats)}
        return {"tensors": weights | self.optimizer.tensors(), "steps": self.optimizer.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies a `state_dict` of the same layout and rank in.

        Raises:
            ValueError: it is of another model, layout or dtype.
        """
        mine, theirs = self.state_dict()["tensors"], state["tensors"]
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mine.items()}
        if shapes != {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in theirs.items()}:
            raise ValueError("the trainer's state is of another model, layout or model.dtype than this run's")
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])
        self.optimizer.steps = state["steps"]

    def _collect_gradients(self) -> None:
        # Gradients are summed in fp32 whatever the weights' dtype; autograd's own tensor lives only until it was added.
        views = self.optimizer.gradients.views
        for name, param in self.model.named_parameters():

            def add(param: torch.Tensor, gradient: torch.Tensor = views[name]) -> None:
                assert param.grad is not None
                gradient.add_(param.grad)
                param.grad = None

            param.register_post_accumulate_grad_hook(add)

    def _micro_batches(
        self, sequences: Sequences, plan: list[list[int]] | None = None
    ) -> tuple[list[Sequences], _Totals]:
        """This rank's micro-batches, as many as the rank with most has, and the totals of all ranks. One collective."""
        plan = plan_micro_batches(sequences.lengths, self.config.token_budget) if plan is None else plan
        weight = sequences.loss_mask if sequences.token_weight is None else sequences.token_weight * sequences.loss_mask
        ranks = mine = torch.tensor([[weight.sum(), len(sequences.tokens), len(plan)]], dtype=torch.float64)
        if self.mesh.dp_group is not None:
            ranks = mine.new_empty(self.mesh.parallel.dp, 3)
            dist.all_gather_into_tensor(ranks, mine, group=self.mesh.dp_group)
        totals = _Totals(float(ranks[:, 0].sum()), int(ranks[:, 1].sum()), int(ranks[:, 2].max()))
        plan = plan + [[]] * (totals.micro_batches - len(plan))
        return [sequences.select(indices) for indices in plan], totals

    def _forward(
        self, batch: Sequences, router_stats: list[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [n] on the device of the trained tokens, and their rows int64 [n] on the
        CPU."""
        rows, device = batch.loss_mask.nonzero().squeeze(1), self.device.torch_device
        hidden_ND = self._hidden(batch, router_stats)
        logits_nVl = self.model.logits(hidden_ND.index_select(0, (rows - 1).to(device)))
        targets_n = batch.tokens[rows].to(device)
        return *vocab_parallel_logprobs(logits_nVl, targets_n, self.mesh, self.temperature), rows

    def _hidden(self, batch: Sequences, router_stats: list[torch.Tensor] | None) -> torch.Tensor:
        device = self.device.torch_device
        attend = PackedAttention(batch.lengths)
        return self.model(batch.tokens.to(device), batch.positions.to(device), attend, router_stats)

    def _backward(
        self, batch: Sequences, loss: Loss, totals: _Totals, counts_E: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        stats: list[torch.Tensor] = []
        logprobs, entropy, rows = self._forward(batch, stats)

        def column(values_N: torch.Tensor | None) -> torch.Tensor | None:
            return None if values_N is None else values_N[rows].to(self.device.torch_device)

        owner = torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.lengths, dtype=torch.int64))
        out = loss(
            LossInput(
                logprobs,
                entropy,
                owner[rows].bincount(minlength=len(batch.lengths)).tolist(),
                column(batch.advantages),
                column(batch.behaviour_logprobs),
                column(batch.ref_logprobs),
            )
        )
        weight_n = column(batch.token_weight)

        def total(values_n: torch.Tensor) -> torch.Tensor:
            return (values_n if weight_n is None else values_n * weight_n).sum()

        objective = total(out.loss) / max(totals.weight, 1e-12)
        metrics = {name: total(values) for name, values in out.metrics.items()}
        metrics |= {"actor/entropy": total(entropy.detach()), "actor/loss": total(out.loss.detach())}
        if self.balancing_coef:
            if counts_E is None:
                counts_E = self._sum_counts(stats)
            balance = load_balancing_loss(stats, counts_E, totals.rows * len(stats))
            objective = objective + self.balancing_coef * balance
            metrics["actor/load_balancing_loss"] = balance.detach()
        objective.backward()
        return metrics

    @torch.no_grad()
    def _routing_counts(self, batches: list[Sequences]) -> torch.Tensor:
        """Tokens that each expert gets from the whole global batch, summed over layers: float32 [E]."""
        stats: list[torch.Tensor] = []
        for batch in batches:
            self._hidden(batch, stats)
        return self._sum_counts(stats)

    def _sum_counts(self, stats: list[torch.Tensor]) -> torch.Tensor:
        counts_E = torch.stack([layer[0] for layer in stats]).detach().sum(0)
        if self.mesh.world_group is not None:
            dist.all_reduce(counts_E, group=self.mesh.world_group)
        return counts_E

    def _metrics(self, sums: dict[str, torch.Tensor], totals: _Totals) -> dict[str, float]:
        """Sums over this rank's tokens → means over the global batch. One collective."""
        values = torch.stack([value.to(torch.float64) for value in sums.values()]).cpu()
        balance = "actor/load_balancing_loss"
        if self.mesh.world_group is not None:
            # Tokens are the same on the ranks of a TP group, which counts them once; rows of the router are not.
            counted = [name == balance or self.mesh.tp_rank == 0 for name in sums]
            values *= torch.tensor(counted)
            dist.all_reduce(values, group=self.mesh.world_group)
        figures = dict(zip(sums, values.tolist(), strict=True))
        balancing = figures.pop(balance, None)
        means = {name: value / totals.weight for name, value in figures.items()} if totals.weight else {}
        if balancing is not None:
            means[balance] = balancing
            means["actor/loss"] = means.get("actor/loss", 0.0) + self.balancing_coef * balancing
        return means
