"""Define the model once, for training and inference, in any layout. What a layer consists of, its `LayerSpec` says.

Between blocks the rows of a packed batch are split over TP. A block gathers them, computes its heads or its columns,
and reduce-scatters the sum; the MoE computes on the split rows and exchanges them over EP.

    ids_N ─ embed ─► x_[N/tp]D ─► { norm ─ gather ─ qkv ─ rope ─ attend ─ out ─ scatter ─(+)
                                    norm ─ MLP or MoE ─(+) } × layers ─► norm ─ gather ─► hidden_ND

A pipeline stage holds consecutive layers: x enters it as ``hidden`` and leaves it before the norm, both split over TP.
A trainer and an engine differ only in ``attend``: the trainer attends within packed sequences, the engine writes to and
reads from its paged KV cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusion.model.attention import Attend, Attention, LatentAttention
from fusion.model.bucket_plan import plan_units, unit_bytes
from fusion.model.collectives import RowSplit, gather_rows, may_be_whole, reduce_scatter_rows, shard_range
from fusion.model.config import ModelConfig
from fusion.model.exchange import RowExchange
from fusion.model.formats import Format, embedded_format, local_table
from fusion.model.head import Head
from fusion.model.id_mask import IdMask
from fusion.model.matrix import Adapted, Weights, below, blocks_of, parameter
from fusion.model.mesh import Mesh
from fusion.model.moe import MLP, MoE
from fusion.model.replay import Forced, Replay, Routed, routing_of
from fusion.model.rotary import cosines_and_sines, inverse_frequencies
from fusion.model.spec import Dense, GroupedQuery, Latent, LayerSpec, Sparse
from fusion.model.weights import Buckets
from fusion.npu import Device
from fusion.npu.operators import BATCH_INVARIANT_ROWS, Plain, linear


class Transformer(nn.Module):
    """Compute one rank's shard of the model, as `TrainedModel` (`fusion.training.model`) documents its methods. Its
    parameters are views into `weights` (flat `Buckets`), initially zero.
    ``dtype``: of the weights and of the arithmetic; norms and the router's softmax run in float32, as in transformers.
    ``bucket_bytes``: determines the size of the largest unit of storage (`unit_bytes`).
    ``batch_invariant``: make a row's result bitwise independent of the other rows in its batch.
    ``share``: weights of another model on this card; units that both hold are stored once, in ``share``.
    ``resident``: False: hold no memory for the weights after construction."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        device: Device,
        dtype: torch.dtype = torch.float32,
        *,
        bucket_bytes: int = 256 << 20,
        batch_invariant: bool = False,
        share: Buckets | None = None,
        resident: bool = True,
    ):
        super().__init__()
        self.config, self.mesh, self.device, self.operators = config, mesh, device, device.operators
        self.row_multiple = BATCH_INVARIANT_ROWS if batch_invariant else 1
        self.recompute = False
        self.bucket_bytes, max_bytes = bucket_bytes, unit_bytes(bucket_bytes)
        self.format: Format = embedded_format(self.operators)
        self.table = local_table(
            self.format, config, mesh.parallel, mesh.rank, max_bytes=max_bytes, itemsize=dtype.itemsize
        )
        plans = plan_units(self.table, dtype.itemsize, max_bytes)
        apart = [param for param in self.table if param.storage != "unit"]
        self.weights = Buckets(plans, device, dtype, owner="weights", share=share, resident=resident, apart=apart)
        views = self.weights.views | {stack: view for stack, (view,) in self.weights.stacks.items()}
        own_layers = mesh.parallel.layers(config.num_layers, mesh.pp_rank)
        self.layers = nn.ModuleDict()
        for index, i in enumerate(own_layers):
            own = below(f"layers.{i}.", views)
            self.layers[str(i)] = Layer(config, config.layers[i], mesh, self.operators, index=index, weights=own)
        self._is_sparse = [isinstance(config.layers[i].mlp, Sparse) for i in own_layers]
        self.num_sparse_layers = sum(self._is_sparse)
        tied = config.tie_embeddings and not config.num_labels
        if mesh.first_stage or (mesh.last_stage and tied):
            self.embed = parameter("embed", views)
        if mesh.last_stage:
            self.norm = nn.Parameter(views["norm"])
            if config.num_labels:
                self.score = nn.Parameter(views["score"])
            else:
                self.lm_head = self.embed if tied else parameter("lm_head", views)
                mask = IdMask.of_rank(config, mesh, device.torch_device)
                self.head = Head(blocks_of(self.lm_head), mask, self.row_multiple)
        self.inv_freq = inverse_frequencies(config.attention.rotary).to(device.torch_device)
        self._adapted = [module for module in self.modules() if isinstance(module, Adapted)]
        self._scale_adapters(config.adapters.scale if config.adapters else 0.0)
        trained = {param.stack or param.name for param in self.table if param.trained}
        for name, param in self.named_parameters():
            param.requires_grad_(name in trained)

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by their names in `table`, and stacks by theirs."""
        for name, param in super().named_parameters(*args, **options):
            yield name.replace(".base", ""), param

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        assert self.config.adapters is not None
        self._scale_adapters(0.0)
        try:
            yield
        finally:
            self._scale_adapters(self.config.adapters.scale)

    def _scale_adapters(self, scale: float) -> None:
        for matrix in self._adapted:
            matrix.scale = scale

    def keep_probabilities(self) -> None:
        for module in self.modules():
            if isinstance(module, MoE):
                module.keep_probabilities = True

    def forward(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        attend: Attend,
        routed: list[Routed] | None = None,
        hidden: torch.Tensor | None = None,
        replay: Replay | None = None,
        rows: RowSplit | None = None,
    ) -> torch.Tensor:
        """Compute the hidden states [N, D] after the final norm.

        All ranks of an EP group must call it equally often; N may be 0.
        ``ids_N``, ``positions_N``: int64 [N], the same on all TP ranks.
        ``routed``: one `Routed` of this rank's rows is appended per MoE layer.
        ``hidden``: what the previous pipeline stage returned; None on the first stage.
        ``replay``: the experts to route the rows to.
        ``rows``: how the N rows lie on the ranks, alike on all TP and EP ranks; `RowSplit.whole` only if
            `can_hold_whole_rows`, in inference mode and without ``replay``.
        Return, on the last stage, [N, D] after the norm; on the others, this TP rank's rows [n, D] before it
            (`hidden_rows`; where rows are whole, all N)."""
        rows = RowSplit(ids_N.shape[0]) if rows is None else rows
        rope = cosines_and_sines(positions_N, self.inv_freq, self.config.attention.rotary, self.weights.dtype)
        assert (hidden is None) == self.mesh.first_stage, "hidden states come from the stage before, ids from the batch"
        x = self._embed(ids_N, rows) if hidden is None else hidden
        if replay is not None:
            replay = replay.of_rank(self.mesh, self.config.num_experts, self.device.torch_device)
        num_sparse = 0
        for is_sparse, layer in zip(self._is_sparse, self.layers.values(), strict=True):
            forced = replay.layer(num_sparse) if replay is not None and is_sparse else None
            num_sparse += is_sparse
            inputs: dict[str, Any] = dict(
                rows=rows,
                rope=rope,
                attend=attend,
                row_multiple=self.row_multiple,
                forced=forced,
                record=routed is not None,
            )
            if self.recompute and torch.is_grad_enabled():
                # Exchanges are known when the layer is recomputed: the host need not wait for them again.
                exchanges: list[RowExchange] = []
                x, layer_routed = checkpoint(layer, x, use_reentrant=False, early_stop=False, kept=exchanges, **inputs)
            else:
                x, layer_routed = layer(x, **inputs)
            if routed is not None and layer_routed is not None:
                routed.append(layer_routed)
        if not self.mesh.last_stage:
            return x
        return gather_rows(self.operators.rms_norm(x, self.norm, self.config.rms_norm_eps), rows, self.mesh)

    @property
    def can_hold_whole_rows(self) -> bool:
        """Whether small passes may have `RowSplit.whole`: where the host runs ahead of the card, and a row's bits may
        depend on its batch."""
        # The operators that run the experts of whole rows take no adapters.
        plain = self.row_multiple == 1 and self.config.adapters is None
        return plain and self.operators.runs_ahead and may_be_whole(self.mesh.parallel)

    @property
    def max_dispatched_rows(self) -> int:
        """Number of rows of each rank that the card's operators dispatch to experts; 0 if there are none."""
        config, ranks = self.config, self.mesh.parallel.ep
        if self.mesh.dispatch_group is None or config.adapters is not None:
            return 0
        return self.operators.max_dispatched_rows(
            ranks, config.num_experts, config.top_k, hidden=config.hidden_size, dtype=self.weights.dtype
        )

    def hidden_rows(self, rows: int) -> int:
        return len(self.own_rows(rows))

    def own_rows(self, rows: int) -> range:
        return shard_range(rows, self.mesh.parallel.tp, self.mesh.tp_rank)

    def routing_of(self, routed: list[Routed], rows: int) -> torch.Tensor:
        return routing_of(routed, rows, self.mesh, num_experts=self.config.num_experts).cpu()

    def scores(self, hidden_nD: torch.Tensor) -> torch.Tensor:
        """Compute a reward model's scores [n, labels] from hidden states [n, D], on all TP ranks. On the last stage."""
        return linear(hidden_nD, self.score, self.row_multiple)

    def _embed(self, ids_N: torch.Tensor, rows: RowSplit) -> torch.Tensor:
        blocks = blocks_of(self.embed)
        if self.mesh.tp_group is None and len(blocks) == 1:
            return F.embedding(ids_N, blocks[0])
        first = self.mesh.tp_rank * sum(block.shape[0] for block in blocks)
        partial = None
        for block in blocks:
            local = ids_N - first
            is_local = (local >= 0) & (local < block.shape[0])
            looked_up = F.embedding(local.where(is_local, 0), block) * is_local.unsqueeze(-1)
            partial = looked_up if partial is None else partial + looked_up
            first += block.shape[0]
        assert partial is not None
        return reduce_scatter_rows(partial, rows, self.mesh)


class Layer(nn.Module):
    """Compute attention and the MLP or MoE, with the norms around them. ``index`` counts from the first layer of this
    rank's stage."""

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, mesh: Mesh, operators: Plain, *, index: int, weights: Weights
    ):
        super().__init__()
        self.operators, self.eps = operators, config.rms_norm_eps
        self.is_sparse = isinstance(spec.mlp, Sparse)
        self.input_norm = nn.Parameter(weights["input_norm"])
        own = below("attention.", weights)
        self.attention: nn.Module
        match spec.attention:
            case GroupedQuery():
                self.attention = Attention(spec.attention, mesh, operators, index=index, eps=self.eps, weights=own)
            case Latent():
                self.attention = LatentAttention(spec.attention, mesh, operators, index=index, weights=own)
        self.attention_norm = nn.Parameter(weights["attention_norm"]) if spec.sandwich else None
        self.post_norm = nn.Parameter(weights["post_norm"])
        match spec.mlp:
            case Sparse():
                self.moe = MoE(spec.mlp, mesh, operators, below("moe.", weights))
            case Dense():
                self.mlp = MLP(mesh, operators, below("mlp.", weights))
        self.mlp_norm = nn.Parameter(weights["mlp_norm"]) if spec.sandwich else None

    def forward(
        self,
        x: torch.Tensor,
        rows: RowSplit,
        rope: Any,
        attend: Attend,
        row_multiple: int,
        forced: Forced | None = None,
        record: bool = True,
        kept: list[RowExchange] | None = None,
    ) -> tuple[torch.Tensor, Routed | None]:
        norm = self.operators.rms_norm
        y = self.attention(norm(x, self.input_norm, self.eps), rows, rope, attend=attend, row_multiple=row_multiple)
        if self.attention_norm is not None:
            y = norm(y, self.attention_norm, self.eps)
        (normed, x), routed = self.operators.add_rms_norm(y, x, self.post_norm, self.eps), None
        if self.is_sparse:
            y, routed = self.moe(normed, row_multiple, forced, record=record, rows=rows, kept=kept)
        else:
            y = self.mlp(normed, rows, row_multiple)
        return x + (y if self.mlp_norm is None else norm(y, self.mlp_norm, self.eps)), routed
