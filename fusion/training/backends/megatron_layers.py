"""Supply what Megatron-Core's layers have only with Transformer Engine, or compute otherwise: norms, attention within
packed sequences, latent attention, and a router that records and replays. Import it only after
`megatron_device.redirect_to`."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from fusion.model import PackedAttention, Routed
from fusion.model.replay import Forced
from fusion.model.spec import Latent, Router
from fusion.npu.operators import Plain
from fusion.npu.operators.gating import choose, probabilities, score, weigh

# The file of 0.16.1 takes stand-ins for an installed Transformer Engine.
multi_latent_attention.HAVE_TE = HAVE_TE


class Norm(nn.Module):
    """Normalise the last dimension as the embedded model does. Under sequence parallelism each TP rank's gradient is
    a partial sum, which the optimizer adds up."""

    operators = Plain()
    """Operators of the model's card, once it is built"""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.rms_norm(x, self.weight, self.eps)


class ProjectionNorm(nn.Module):
    """Normalise all heads of all TP ranks by one root mean square, as OLMoE does queries, and keys. ``heads``: of this
    rank; all ranks have equally many."""

    def __init__(self, config: Any, hidden_size: int, eps: float, heads: int, tp_group: Any):
        super().__init__()
        self.eps, self.tp_group = eps, tp_group
        self.weight = nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x_N1HC: torch.Tensor) -> torch.Tensor:
        x_N1W = x_N1HC.flatten(-2)
        x32 = x_N1W.to(torch.float32)
        mean_N11 = x32.square().mean(-1, keepdim=True) / self.tp_group.size()
        # each rank's result depends on the squares of all: their gradient is a sum over the ranks, too
        total_N11 = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(mean_N11, self.tp_group), self.tp_group
        )
        normed = self.weight * (x32 * torch.rsqrt(total_N11 + self.eps)).to(x_N1W.dtype)
        return normed.view_as(x_N1HC)


def normalise_output(module: nn.Module, norm: Norm) -> None:
    """Make a module of Megatron, which returns (output, bias), normalise its output: the second norm of a layer with
    sandwich norms, which Megatron does not have."""
    module.output_layernorm = norm
    module.register_forward_hook(lambda module, _, out: (module.output_layernorm(out[0]), *out[1:]))


class BiasedRowParallelLinear(RowParallelLinear):
    """Have a bias also where no other linear map of the model has one."""

    def __init__(self, *args: Any, bias: bool, **options: Any):
        super().__init__(*args, bias=True, **options)


class PackedCoreAttention(nn.Module):
    """Attend within packed sequences. Megatron passes its attention mask through unread: it is the `PackedAttention`
    of the batch."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def forward(
        self,
        query_N1HC: torch.Tensor,
        key_N1KC: torch.Tensor,
        value_N1KC: torch.Tensor,
        attention_mask: PackedAttention,
        **_: Any,
    ) -> torch.Tensor:
        """Return the output [N, 1, H C] of this rank's heads."""
        out_NHC = attention_mask(0, query_N1HC.squeeze(1), key_N1KC.squeeze(1), value_N1KC.squeeze(1))
        return out_NHC.flatten(1).unsqueeze(1)


class PackedLatentAttention(multi_latent_attention.MLASelfAttention):
    """Compute multi-head latent attention within packed sequences, with Megatron's linear maps.

    x_nD ─┬─ q_down ─ own rows ─ norm ─ q_up (gathers rows) ─ rotate ─► q_NHC ──┐
          └─ kv_down ─ own rows ─┬─ norm ─ kv_up (gathers rows) ─► k_NHX, v_NHV ┤
                                 └─ gather ─ rotate ─► the key that heads share ┴─ attend ─ proj ─► y_nD

    Megatron's own forward pass counts positions through a pack, rotates rows in another order than checkpoints have
    them, and drops the other TP ranks' gradient of the shared key where its down projections are cut."""

    def __init__(self, *args: Any, spec: Latent, **options: Any):
        super().__init__(*args, **options)
        self.spec = spec
        del self.rotary_pos_emb
        self.kv_layernorm.eps = spec.norm_eps
        if spec.q_rank is not None:
            self.q_layernorm.eps = spec.norm_eps

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: PackedAttention,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [n, 1, D] for this TP rank's rows, and no bias. ``rotary_pos_emb``: `cosines_and_sines` of
        the whole batch."""
        spec = self.spec
        if spec.q_rank is None:
            flat_q, _ = self.linear_q_proj(hidden_states)
        else:
            low_rank = self._own_rows(self.linear_q_down_proj(hidden_states)[0])
            flat_q, _ = self.linear_q_up_proj(self.q_layernorm(low_rank))
        latent = self._own_rows(self.linear_kv_down_proj(hidden_states)[0])
        compressed, key = latent.split([spec.kv_rank, spec.rope_dim], dim=-1)
        flat_kv, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        if self.pg_collection.tp.size() > 1:
            key = gather_from_sequence_parallel_region(key, group=self.pg_collection.tp)
        rotate = attention_mask.operators.rotate
        shared_key = rotate(key, rotary_pos_emb, spec.rotary.interleaved)

        q_NHC = flat_q.squeeze(1).unflatten(-1, (-1, spec.head_dim))
        q_nope, q_rotated = q_NHC.split([spec.nope_dim, spec.rope_dim], dim=-1)
        kv_NHX = flat_kv.squeeze(1).unflatten(-1, (-1, spec.nope_dim + spec.value_dim))
        k_nope, v_NHV = kv_NHX.split([spec.nope_dim, spec.value_dim], dim=-1)
        out_NHV = attention_mask.operators.varlen_attention(
            torch.cat([q_nope, rotate(q_rotated, rotary_pos_emb, spec.rotary.interleaved)], dim=-1),
            torch.cat([k_nope, shared_key.expand(-1, k_nope.shape[1], -1)], dim=-1),
            v_NHV,
            lengths=attention_mask.lengths,
            scale=spec.softmax_scale,
        )
        return self.linear_proj(out_NHV.flatten(1).unsqueeze(1))

    def _own_rows(self, x_N1: torch.Tensor) -> torch.Tensor:
        """Exchange this TP rank's columns [N, 1, W / tp] of all rows for all columns of its rows, [n, 1, W]."""
        tp_group = self.pg_collection.tp
        return x_N1 if tp_group.size() == 1 else all_to_all_hp2sp(x_N1, tp_group).unsqueeze(1)


@dataclass
class RoutingTrace:
    """What a router is told of a pass, and what it reports.
    ``rows``: number of this rank's rows that are no padding; padding follows them.
    ``forced``: the experts to route this rank's rows to, padding included.
    ``keeps_probabilities``: report the probabilities of each row.
    ``routed``: the routing of the ``rows``."""

    rows: int
    forced: Forced | None = None
    keeps_probabilities: bool = False
    routed: Routed | None = None


class TracedRouter(TopKRouter):
    """Choose and weigh experts as the embedded model does, from the logits that Megatron computes. Replay the
    experts of `trace`, and record its routing there."""

    def __init__(self, *args: Any, router: Router, **options: Any):
        super().__init__(*args, **options)
        self.router, self.trace = router, None
        if router.correction:
            bias_E = torch.zeros(self.config.num_moe_experts, dtype=torch.float32)
            self.expert_bias = nn.Parameter(bias_E, requires_grad=False)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts' weights [N, E], 0 where not chosen, and the choice, bool [N, E]."""
        trace: RoutingTrace | None = self.trace
        scores_NE = score(logits.flatten(0, -2), self.router)
        expert_Nk, mismatched_n = choose(scores_NE, self.router, self.expert_bias), None
        if trace is not None and trace.forced is not None:
            mismatched_n = trace.forced.mismatched(expert_Nk)
            expert_Nk = trace.forced.impose(expert_Nk)
        weight_Nk = weigh(scores_NE.gather(-1, expert_Nk), self.router)
        weights_NE = torch.zeros_like(scores_NE).scatter(1, expert_Nk, weight_Nk)
        chosen_NE = torch.zeros_like(scores_NE, dtype=torch.bool).scatter(1, expert_Nk, True)
        if trace is not None:
            probs_nE = probabilities(scores_NE[: trace.rows], self.router)
            stats = torch.stack([chosen_NE[: trace.rows].sum(0, dtype=torch.float32), probs_nE.sum(0)])
            kept = probs_nE if trace.keeps_probabilities else None
            trace.routed = Routed(stats, expert_Nk[: trace.rows], mismatched_n, kept)
        return weights_NE.to(logits.dtype), chosen_NE
