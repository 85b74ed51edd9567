"""Megatron-Core's GPTModel as the model of the train engine.

    rows of a packed batch ─ pad to a multiple of TP ─► embedding ─► Megatron's layers of this stage ─► norm ─ gather ─►

The layers, their parallel linear maps and the dispatch of tokens to experts are Megatron's (its local ones, without
Transformer Engine). Its parameters are views of our `Buckets`. This file calls the layers one by one, so that
activations are recomputed layer by layer and each router's record is returned, as in `Transformer`.

Sequence parallelism splits equal shares of rows over TP: a batch is padded to a multiple of TP, and an empty one to a
row per rank. Padding rows are a sequence of their own, at the end; they are routed but never counted."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusion.model import (
    Buckets,
    Head,
    Mesh,
    ModelConfig,
    PackedAttention,
    Replay,
    Routed,
    plan_units,
    routing_dtype,
    unit_bytes,
)
from fusion.model.attention import Attend
from fusion.model.formats import MEGATRON, Format, local_table
from fusion.model.id_mask import IdMask
from fusion.model.local_param import LocalParam
from fusion.model.replay import Forced
from fusion.model.rotary import cosines_and_sines, inverse_frequencies
from fusion.model.spec import Latent, Sparse
from fusion.npu import Device
from fusion.training.backends.megatron_device import redirect_to


class MegatronModel:
    """Compute one rank's shard of the model with Megatron-Core's layers, as a `TrainedModel`: arguments and results
    are those of `Transformer`.
    Raise ImportError: megatron-core is not installed.
    Raise ValueError: Megatron-Core does not compute this model, or not in this layout."""

    format: Format = MEGATRON

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        device: Device,
        dtype: torch.dtype = torch.float32,
        *,
        bucket_bytes: int = 256 << 20,
    ):
        self.config, self.mesh, self.device, self.bucket_bytes = config, mesh, device, bucket_bytes
        self.recompute, self._keeps_probabilities = False, False
        max_bytes, parallel = unit_bytes(bucket_bytes), mesh.parallel
        self.table = local_table(MEGATRON, config, parallel, mesh.rank, max_bytes=max_bytes, itemsize=dtype.itemsize)
        redirect_to(device)
        groups = process_groups(mesh, device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about settings of CUDA, whatever the card is
            from fusion.training.backends.megatron_gpt import Norm, build_gpt

            self.gpt = build_gpt(config, parallel, mesh.rank, groups, dtype)
        for module in self.gpt.modules():
            if isinstance(module, Norm):
                module.operators = device.operators
        apart = [param for param in self.table if param.storage != "unit"]
        plans = plan_units(self.table, dtype.itemsize, max_bytes)
        self.weights = Buckets(plans, device, dtype, owner="weights", apart=apart)
        self._store_parameters()
        own_layers = parallel.layers(config.num_layers, mesh.pp_rank)
        self._layers = list(self.gpt.decoder.layers)
        self._is_sparse = [isinstance(config.layers[layer].mlp, Sparse) for layer in own_layers]
        self.num_sparse_layers = sum(self._is_sparse)
        self._inv_freq = inverse_frequencies(config.attention.rotary).to(device.torch_device)
        self._mask = IdMask.of_rank(config, mesh, device.torch_device)

    def _store_parameters(self) -> None:
        """Replace Megatron's parameters, which have no storage, by views of the buckets."""
        table = {param.name: param.shape for param in self.table if self._computes_with(param)}
        names = {name: tuple(param.shape) for name, param in self.gpt.named_parameters()}
        assert names == table, f"Megatron's parameters differ from their table: {names.items() ^ table.items()}"
        for path, module in list(self.gpt.named_modules()):
            for name, param in module._parameters.items():
                if param is not None:
                    stored = nn.Parameter(self.weights.views[f"{path}.{name}"], requires_grad=param.requires_grad)
                    stored.__dict__.update(param.__dict__)  # what Megatron has marked it with
                    module._parameters[name] = stored

    def _computes_with(self, param: LocalParam) -> bool:
        """Return whether this rank's layers have a parameter: neither a predictor of further tokens, nor the correction
        bias of another stage's router."""
        if param.storage == "card":
            return param.layer in self.mesh.parallel.layers(self.config.num_layers, self.mesh.pp_rank)
        return param.storage == "unit"

    def adapters_off(self) -> AbstractContextManager[None]:
        raise AssertionError("Megatron-Core's layers have no adapters here")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.gpt.named_parameters()

    def hidden_rows(self, rows: int) -> int:
        return self._padded(rows) // self.mesh.parallel.tp

    def own_rows(self, rows: int) -> range:
        share = self.hidden_rows(rows)
        first = min(self.mesh.tp_rank * share, rows)
        return range(first, min(first + share, rows))

    def _padded(self, rows: int) -> int:
        tp = self.mesh.parallel.tp
        return max(rows + -rows % tp, tp)

    def __call__(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        attend: Attend,
        routed: list[Routed] | None = None,
        hidden: torch.Tensor | None = None,
        replay: Replay | None = None,
    ) -> torch.Tensor:
        assert isinstance(attend, PackedAttention), "parallel.train.cp is refused with Megatron-Core"
        rows = ids_N.shape[0]
        padding = self._padded(rows) - rows
        attend = PackedAttention([*attend.lengths, padding] if padding else attend.lengths, attend.operators)
        rope = self._rope(F.pad(positions_N, (0, padding)))
        x = self._embed(F.pad(ids_N, (0, padding))) if hidden is None else hidden.unsqueeze(1)
        forced = self._forced(replay, padding) if replay is not None else None
        num_sparse = 0
        for layer, is_sparse in zip(self._layers, self._is_sparse, strict=True):
            inputs: dict[str, Any] = dict(
                layer=layer,
                rope=rope,
                attend=attend,
                rows=len(self.own_rows(rows)) if is_sparse and (routed is not None or forced) else None,
                forced=forced.layer(num_sparse) if forced is not None and is_sparse else None,
            )
            num_sparse += is_sparse
            if self.recompute and torch.is_grad_enabled():
                x, layer_routed = checkpoint(self._layer, x, use_reentrant=False, early_stop=False, **inputs)
            else:
                x, layer_routed = self._layer(x, **inputs)
            if routed is not None and layer_routed is not None:
                routed.append(layer_routed)
        if not self.mesh.last_stage:
            return x.squeeze(1)
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        x = self.gpt.decoder.final_layernorm(x)
        if self.mesh.tp_group is not None:
            x = gather_from_sequence_parallel_region(x, group=self.mesh.tp_group)
        return x[:rows, 0]

    def _layer(
        self,
        x: torch.Tensor,
        *,
        layer: Any,
        rope: Any,
        attend: PackedAttention,
        rows: int | None,
        forced: Forced | None,
    ) -> tuple[torch.Tensor, Routed | None]:
        """Compute a layer. ``rows``: trace its router, for this many of its rows; None: trace none."""
        from fusion.training.backends.megatron_layers import RoutingTrace

        if rows is None:
            return layer(hidden_states=x, attention_mask=attend, rotary_pos_emb=rope)[0], None
        router = layer.mlp.router
        router.trace = trace = RoutingTrace(rows, forced, self._keeps_probabilities)
        x, _ = layer(hidden_states=x, attention_mask=attend, rotary_pos_emb=rope)
        router.trace = None
        return x, trace.routed

    @property
    def head(self) -> Head:
        tied = self.config.tie_embeddings and self.mesh.first_stage
        return Head([self.gpt.embedding.word_embeddings.weight if tied else self.gpt.output_layer.weight], self._mask)

    def keep_probabilities(self) -> None:
        self._keeps_probabilities = True

    def routing_of(self, routed: list[Routed], rows: int) -> torch.Tensor:
        experts_nLk = torch.stack([layer.expert_nk for layer in routed], 1).to(routing_dtype(self.config.num_experts))
        if self.mesh.tp_group is None:
            return experts_nLk.cpu()
        own = experts_nLk.new_zeros(self.hidden_rows(rows), *experts_nLk.shape[1:])
        own[: len(experts_nLk)] = experts_nLk
        # sent as bytes, since some backends do not support every integer dtype
        wire = own.flatten(1).view(torch.uint8)
        gathered = wire.new_empty(self._padded(rows), wire.shape[1])
        dist.all_gather_into_tensor(gathered, wire, group=self.mesh.tp_group)
        return gathered.view(own.dtype)[:rows].unflatten(1, own.shape[1:]).cpu()

    def _forced(self, replay: Replay, padding: int) -> Replay:
        """Return this TP rank's rows of a replay, padded by rows that follow their router."""
        experts = F.pad(replay.experts_NLk, (0, 0, 0, 0, 0, padding))
        share = len(experts) // self.mesh.parallel.tp
        own = slice(self.mesh.tp_rank * share, (self.mesh.tp_rank + 1) * share)
        known, device = F.pad(replay.known_N, (0, padding))[own], self.device.torch_device
        return Replay(experts[own].to(device), known.to(device))

    def _embed(self, ids_N: torch.Tensor) -> torch.Tensor:
        x = self.gpt.embedding.word_embeddings(ids_N.unsqueeze(0))
        return x if self.mesh.parallel.tp > 1 else x.transpose(0, 1)  # it has scattered [N, 1, D] over TP

    def _rope(self, positions_N: torch.Tensor) -> Any:
        """Return what layers rotate by: Megatron's angles [N, 1, 1, R], or `cosines_and_sines` for latent attention."""
        rotary = self.config.attention.rotary
        if isinstance(self.config.attention, Latent):
            return cosines_and_sines(positions_N, self._inv_freq, rotary, self.weights.dtype)
        angles = positions_N.to(torch.float32)[:, None] * self._inv_freq
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]


def process_groups(mesh: Mesh, device: Device) -> Any:
    """Return the groups of a mesh as Megatron's `ProcessGroupCollection`. Collective over the mesh."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not dist.is_initialized():  # Megatron needs groups also of a single card
        dist.init_process_group(device.process_group_backend, store=dist.HashStore(), rank=0, world_size=1)
    backend = device.process_group_backend
    alone = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    tp, dp, edp, stage = (group or alone for group in (mesh.tp_group, mesh.dp_group, mesh.edp_group, mesh.stage_group))
    parallel_state._GLOBAL_MEMORY_BUFFER = TransientBuffer(device)
    return ProcessGroupCollection(
        tp=tp,
        pp=mesh.pp_group or alone,
        cp=alone,
        tp_cp=tp,
        ep=mesh.ep_group or alone,
        expt_tp=mesh.etp_group or alone,
        tp_ep=_expert_group(mesh, backend) or alone,
        tp_dp_cp=stage,
        dp=dp,
        dp_cp=dp,
        expt_dp=edp,
        embd=None,
    )


def _expert_group(mesh: Mesh, backend: str) -> dist.ProcessGroup | None:
    """Return the group of the ranks that together hold all experts of a stage. Collective over them."""
    parallel = mesh.parallel
    if parallel.ep == 1 or parallel.etp == 1:
        return mesh.ep_group or mesh.etp_group
    if parallel.edp == 1:
        return mesh.stage_group
    assert mesh.world_group is not None
    ranks = dist.get_process_group_ranks(mesh.world_group)
    own = [parallel.coordinate(axis, mesh.rank) for axis in ("pp", "edp")]  # type: ignore[arg-type]
    members = [
        rank
        for place, rank in enumerate(ranks)
        if [parallel.coordinate(axis, place) for axis in ("pp", "edp")] == own  # type: ignore[arg-type]
    ]
    return dist.new_group(members, backend=backend, use_local_synchronization=True)


class TransientBuffer:
    """Stand in for Megatron's global buffers, which would stay in HBM while the card generates."""

    def __init__(self, device: Device):
        self.device = device

    def get_tensor(self, shape: list[int], dtype: torch.dtype, name: str, *_: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device.torch_device)
