"""Train the policy on one rank: accumulate gradients from packed sequences, then update the weights.

    sequences ─ split_micro_batches ─► each through PipelineStage: forward ─ Objective ─ backward ─► gradients
    optimizer_step: gradients ─ ShardedAdamW ─► weights; rows of each expert ─ RouterBias ─► correction biases

Invariants: the loss is a mean over the trained tokens of the *global* batch (`Objective`), so loss and gradient do not
depend on the layout, on micro-batches or on packing, except for rounding. All ranks run the same number of
micro-batches, because the exchange of tokens between experts is collective: a rank with fewer runs empty ones. The lm
head runs on the last stage, only for rows whose log-probability is needed. With context parallelism a rank computes its
rows of each micro-batch (`context_rows`); what a loss reads is that of whole sequences on every rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fusion.model import Buckets, Mesh, Routed, context_rows, over_context
from fusion.model.bucket_plan import trained_units
from fusion.model.weights import views_apart
from fusion.npu import Device, to_card
from fusion.training.batch import Sequences
from fusion.training.chunk_files import Chunk
from fusion.training.config import TrainingConfig
from fusion.training.interface import SKIPPED_IN_A_ROW, TrainEngine
from fusion.training.logprobs import TokenLogprobs, trained_logprobs
from fusion.training.loss import Loss
from fusion.training.micro_batches import attention_of, split_micro_batches
from fusion.training.model import TrainedModel
from fusion.training.objective import BatchSums, Objective, Totals, routing_counts
from fusion.training.optimizer import ShardedAdamW
from fusion.training.replay import new_record, replay_of
from fusion.training.router_bias import RouterBias
from fusion.training.schedule import Schedule
from fusion.training.stage import PipelineStage
from fusion.training.states import MakeStates, ResidentStates

CARD_VALUES = "weights.card"
"""Name of `Buckets.card` in a `state_dict`"""


class EmbeddedTrainEngine:
    """The embedded `TrainEngine`, whose methods are documented there. Trains ``model``, whose weights must be loaded:
    the fp32 masters of bf16 weights are copied from them on construction.
    ``temperature``: the sampling temperature; log-probabilities are those of the distribution at this temperature.
    ``total_steps``: optimizer steps of the run, for the cosine schedule.
    ``states``: creates the storage of the optimizer's states; default: in HBM.
    Raise ValueError: the schedule lacks ``total_steps``."""

    def __init__(
        self,
        model: TrainedModel,
        mesh: Mesh,
        device: Device,
        config: TrainingConfig,
        *,
        temperature: float = 1.0,
        total_steps: int | None = None,
        states: MakeStates = ResidentStates,
    ):
        assert mesh is model.mesh
        self.model, self.mesh, self.device, self.config = model, mesh, device, config
        self.temperature = temperature
        self.schedule = Schedule(config.peak_lr, config.schedule, config.warmup_steps, total_steps)
        self.schedule.rate(config.warmup_steps)
        model.recompute = config.recompute
        self.balancing_coef = config.balancing_coef if model.config.num_experts else 0.0
        self._balances_sequences = self.balancing_coef > 0 and config.load_balancing == "sequence"
        if self._balances_sequences or (self.balancing_coef and config.shares_prefixes != "off"):
            model.keep_probabilities()
        self.optimizer = ShardedAdamW(
            model,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            states=states,
        )
        self.router_bias = RouterBias(model, config.router_bias_rate)
        self.stage = PipelineStage(model)
        self.accumulating = False
        self._sums: BatchSums | None = None
        """Sums of the batch whose gradients no step has used, where they are those of one batch"""
        self._num_sequences = 0
        """Sequences of all ranks whose gradients no step has used"""
        self._collect_gradients()

    def forward_backward(self, sequences: Sequences, loss: Loss, *, continued: bool = False) -> dict[str, float]:
        """Add gradients as `TrainEngine.forward_backward`. The first stage reads all tokens, the last the responses'
        tokens and the columns of the loss; a column may be None on a stage that does not read it. With
        `Sequences.routing` tokens are sent to those experts, weighted by this router; `training/routing_mismatch` is
        the share of (token, layer) pairs that it would have sent to other experts. The load-balancing loss of a batch
        needs the routing of the whole batch before the first backward pass: with more than one micro-batch or stage, an
        extra forward pass without gradients computes it. That of sequences needs none. With ``continued`` the gradients
        are scaled, so that the sum is that of the mean over all of the batch; the load-balancing loss of a part is that
        of its own routing."""
        batches, _, totals = self._micro_batches(sequences)
        of_batch = self.balancing_coef and not self._balances_sequences
        needs_counts = of_batch and len(batches) * self.mesh.parallel.pp > 1
        counts_E = self._routing_counts(batches) if needs_counts else None
        objective = Objective(
            loss,
            totals,
            config=self.model.config,
            mesh=self.mesh,
            balancing_coef=self.balancing_coef,
            own_rows=self._own_rows,
            by_sequence=self._balances_sequences,
            counts_E=counts_E,
            share=self._begin_batch(totals, continued),
        )

        records = self.balancing_coef or self.router_bias.rate or sequences.routing is not None

        def forward(i: int, hidden: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            routed: list[Routed] = []
            out = self._hidden(batches[i], hidden, routed if records else None)
            of_routing = objective.of_routing(batches[i], routed)
            objective.of_replay(batches[i], routed)
            self.router_bias.count(routed)
            if not self.mesh.last_stage:
                return out, of_routing
            of_tokens = objective.of_tokens(batches[i], self._tokens(batches[i], out, with_mass=True))
            return None, of_tokens if of_routing is None else of_tokens + of_routing

        self.accumulating = True
        self._num_sequences += totals.sequences
        self.stage.train(self._rows(batches), forward)
        self.router_bias.collect()
        sums = objective.sums()
        self._sums = sums.after(self._sums) if continued and self._sums else sums
        return self._sums.metrics(self.balancing_coef)

    def optimizer_step(self, before_update: Callable[[], None] | None = None) -> dict[str, float]:
        lr = self.schedule.rate(self.optimizer.steps)
        norm = self.optimizer.step(lr, before_update, updates=self._num_sequences > 0)
        skipped = self.optimizer.skipped_in_a_row
        self.router_bias.update(skipped=skipped > 0)
        self.accumulating, self._num_sequences = False, 0
        return {"actor/grad_norm": norm, "actor/lr": lr, SKIPPED_IN_A_ROW: skipped}

    def logprobs(self, sequences: Sequences, record: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what `TrainEngine.logprobs` documents. ``record`` (`new_record`) receives the experts of all rows
        in this stage's layers."""
        values_2N = torch.zeros(2, sequences.rows)
        batches, places, _ = self._micro_batches(sequences)

        def forward(i: int, hidden: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
            routed: list[Routed] | None = None if record is None else []
            out = self._hidden(batches[i], hidden, routed)
            if record is not None and routed and i < len(places):
                of_computed = self.model.routing_of(routed, batches[i].num_computed)
                record[places[i]] = of_computed[batches[i].computed_at(torch.arange(batches[i].rows))]
            if not self.mesh.last_stage:
                return out, None
            tokens = self._tokens(batches[i], out)
            if i < len(places):
                values_2N[:, places[i][batches[i].trained_rows]] = torch.stack([tokens.logprobs, tokens.entropy]).cpu()
            return None, None

        self.stage.infer(self._rows(batches), forward)
        if self.mesh.pp_group is not None:
            dist.broadcast(values_2N, group=self.mesh.pp_group, group_src=self.mesh.parallel.pp - 1)
        logprobs_N, entropy_N = values_2N
        return logprobs_N, entropy_N

    def with_own_routing(self, sequences: Sequences) -> Sequences:
        record = new_record(sequences, self.model)
        self.logprobs(replace(sequences, loss_mask=torch.zeros_like(sequences.loss_mask)), record)
        return replace(sequences, routing=record)

    @contextmanager
    def using_weights(self, weights: Buckets | None) -> Iterator[None]:
        if weights is None:
            with self.model.adapters_off():
                yield
            return
        own = {name: parameter.data for name, parameter in self.model.named_parameters()}
        try:
            for name, parameter in self.model.named_parameters():
                parameter.data = weights.stacks[name][0] if name in weights.stacks else weights.views[name]
            yield
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.data = own[name]

    def gradients(self) -> dict[str, torch.Tensor]:
        return {f"gradient.{index}": flat for index, flat in enumerate(self.optimizer.gradients.flats)}

    def release_gradients(self) -> None:
        assert not self.accumulating, "gradients that no optimizer step has used would be lost"
        self.optimizer.gradients.release()

    def allocate_gradients(self) -> None:
        assert not self.accumulating, "gradients that no optimizer step has used would be lost"
        self.optimizer.gradients.allocate()
        self.optimizer.zero_gradients()

    def optimizer_states(self) -> dict[str, torch.Tensor]:
        return self.optimizer.tensors()

    def state_dict(self) -> dict[str, Any]:
        """Return what `TrainEngine.state_dict` documents; of a frozen base nothing."""
        weights = {f"weights.{index}": flat for index, flat in enumerate(self.model.weights.trained().flats)}
        if self._has_card_values:
            weights[CARD_VALUES] = self.model.weights.card
        counts = {"steps": self.optimizer.steps, "skipped_in_a_row": self.optimizer.skipped_in_a_row}
        return {"tensors": weights | self.optimizer.tensors(), **counts}

    def chunks(self, state: dict[str, Any]) -> list[Chunk]:
        views = self.weight_views(state)
        return [*self.optimizer.chunks(state["tensors"], views), *self.optimizer.untrained_chunks(views)]

    def resume_at(self, steps: int, skipped_in_a_row: int) -> None:
        self.optimizer.publish()
        self.optimizer.steps, self.optimizer.skipped_in_a_row = steps, skipped_in_a_row

    def weight_views(self, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return what `TrainEngine.weight_views` documents. Those on the host, which never change, are not copied."""
        weights = self.model.weights
        views = {param.name: weights.views[param.name] for param in weights.apart if param.storage == "host"}
        if self._has_card_values:
            views |= views_apart(weights.apart, state["tensors"][CARD_VALUES])
        for index, plan in enumerate(trained_units(weights.plans)):
            views |= plan.views(state["tensors"][f"weights.{index}"])
        return views

    @property
    def _has_card_values(self) -> bool:
        return self.model.weights.card.numel() > 0 and self.model.config.adapters is None

    def _begin_batch(self, totals: Totals, continued: bool) -> float:
        """Return the share of a batch in that which it continues, to whose gradients the others' share is given."""
        if not continued:
            return 1.0
        assert self.accumulating and self._sums, "there is no batch to continue"
        share = totals.share_after(self._sums.totals.normaliser)
        for flat in self.optimizer.gradients.flats:
            flat.mul_(1.0 - share)
        return share

    def _collect_gradients(self) -> None:
        # Gradients are summed in fp32 whatever the weights' dtype; autograd's own tensor is freed once it is added.
        gradients = self.optimizer.gradients
        runs = {name: [view] for name, view in gradients.views.items()} | gradients.stacks
        for name, param in self.model.named_parameters():
            if name not in runs:  # not trained
                continue

            def add(param: torch.Tensor, views: list[torch.Tensor] = runs[name]) -> None:
                if param.grad is not None:  # an expert that no token chose has none
                    parts = [param.grad] if len(views) == 1 else param.grad.split([len(view) for view in views])
                    for view, part in zip(views, parts, strict=True):
                        view.add_(part)
                    param.grad = None

            param.register_post_accumulate_grad_hook(add)

    def _micro_batches(self, sequences: Sequences) -> tuple[list[Sequences], list[torch.Tensor], Totals]:
        """Return this rank's micro-batches, padded with empty ones to the largest number of any rank, the rows of
        ``sequences`` in each that is not padding, and the totals. One collective, and that of `split_micro_batches`."""
        share = self.config.shares_prefixes
        places, batches = split_micro_batches(sequences, self.config.token_budget, share=share, mesh=self.mesh)
        shared = sequences.rows - sum(batch.num_computed for batch in batches)
        counts = sequences.rows, sum(length > 0 for length in sequences.lengths), shared, len(batches)
        local = torch.tensor([[*sequences.loss_totals(), *counts]], dtype=torch.float64)
        by_rank = local
        if self.mesh.dp_group is not None:
            by_rank = local.new_empty(self.mesh.parallel.dp, local.shape[1])
            dist.all_gather_into_tensor(by_rank, local, group=self.mesh.dp_group)
            by_rank = by_rank[:: self.mesh.parallel.cp]  # ranks of one replica have the same sequences
        weight, normaliser, rows, num_sequences, shared, _ = by_rank.sum(0).tolist()
        totals = Totals(
            weight,
            normaliser,
            rows=int(rows),
            sequences=int(num_sequences),
            micro_batches=int(by_rank[:, -1].max()),
            shared=int(shared),
        )
        batches += [sequences.select([])] * (totals.micro_batches - len(batches))
        return batches, places, totals

    def _hidden(
        self, batch: Sequences, hidden: torch.Tensor | None, routed: list[Routed] | None = None
    ) -> torch.Tensor:
        own, device = context_rows(batch.num_computed, self.mesh), self.device.torch_device
        positions = to_card(batch.computed(batch.positions)[own], device)
        # After the first stage the model uses only the number of ids, and the batch may have none.
        ids = to_card(batch.computed(batch.tokens)[own], device) if self.mesh.first_stage else positions
        of_batch: list[Routed] | None = None if routed is None else []
        out = self.model(
            ids,
            positions,
            over_context(attention_of(batch, self.device), batch.num_computed, self.mesh),
            of_batch,
            hidden,
            replay_of(batch, self.model, own, complete=not (self.balancing_coef or self.router_bias.rate)),
        )
        if routed is not None and of_batch is not None:
            routed += self._as_unshared(batch, of_batch)
        return out

    def _as_unshared(self, batch: Sequences, routed: list[Routed]) -> list[Routed]:
        """Return the routing with statistics in which a row counts once for each sequence that it belongs to."""
        if batch.shared is None:
            return routed
        own = self._own_rows(batch.num_computed)
        weight_n = to_card(batch.shared.sequences_M[own.start : own.stop], self.device.torch_device)
        return [layer.weighted(weight_n) for layer in routed]

    def _rows(self, batches: list[Sequences]) -> list[int]:
        """Return how many rows of each micro-batch this rank computes, with its TP group."""
        own = [context_rows(batch.num_computed, self.mesh) for batch in batches]
        return [rows.stop - rows.start for rows in own]

    def _own_rows(self, rows: int) -> range:
        """Return which of the rows of a micro-batch this rank routes."""
        own = context_rows(rows, self.mesh)
        routed = self.model.own_rows(own.stop - own.start)
        return range(own.start + routed.start, own.start + routed.stop)

    def _tokens(self, batch: Sequences, hidden_ND: torch.Tensor, with_mass: bool = False) -> TokenLogprobs:
        return trained_logprobs(self.model, batch, hidden_ND, temperature=self.temperature, with_mass=with_mass)

    def _routing_counts(self, batches: list[Sequences]) -> torch.Tensor:
        """Count the tokens of the global batch that each expert receives, summed over layers: float32 [E]."""
        routed: list[Routed] = []

        def forward(i: int, hidden: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
            out = self._hidden(batches[i], hidden, routed)
            return None if self.mesh.last_stage else out, None

        self.stage.infer(self._rows(batches), forward)
        num_experts = self.model.config.num_experts
        return routing_counts(routed, self.mesh, num_experts, self.device.torch_device)


if TYPE_CHECKING:

    def _satisfies_interface(engine: EmbeddedTrainEngine) -> TrainEngine:
        return engine
