"""Supply the layers that Megatron-Core has only with Transformer Engine: norm, attention of packed sequences; and a
router that records and replays. Import it only after `megatron_device.redirect_to`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import nn

from fusion.model import PackedAttention, Routed
from fusion.model.replay import Forced
from fusion.npu.ops import rms_norm


class Norm(nn.Module):
    """Normalises the last dimension as the embedded model does. Under sequence parallelism each TP rank's gradient is
    a partial sum, which the optimizer adds up."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class PackedCoreAttention(nn.Module):
    """Attends within packed sequences. Megatron passes its attention mask through unread: it is the `PackedAttention`
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


@dataclass
class RoutingTrace:
    """What a router is told of a pass, and what it reports.

    Attributes:
        rows: number of this rank's rows that are no padding; padding follows them.
        forced: the experts to route this rank's rows to, padding included.
        routed: the routing of the ``rows``.
    """

    rows: int
    forced: Forced | None = None
    routed: Routed | None = None


class TracedRouter(TopKRouter):
    """Megatron's router. Routes to the experts of `trace` by Megatron's own replay, and records its routing there."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.trace: RoutingTrace | None = None
        self._replay = RouterReplay()
        RouterReplay.global_router_replay_instances.remove(self._replay)  # steered from here, layer by layer
        self._replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts' weights [N, E], 0 where not chosen, and the choice, bool [N, E]."""
        trace, mismatched = self.trace, None
        weights_NE, chosen_NE = super().routing(logits, padding_mask)
        if trace is None:
            return weights_NE, chosen_NE
        if trace.forced is not None:
            own_Nk = self._experts(chosen_NE)
            mismatched = trace.forced.count_mismatched(own_Nk)
            self._replay.target_topk_idx = trace.forced.impose(own_Nk)
            self.router_replay = self._replay
            weights_NE, chosen_NE = super().routing(logits, padding_mask)
            self.router_replay = None
        probs_NE = logits.flatten(0, -2).softmax(-1, dtype=torch.float32)
        chosen_nE = chosen_NE[: trace.rows]
        stats = torch.stack([chosen_nE.sum(0, dtype=torch.float32), probs_NE[: trace.rows].sum(0)])
        trace.routed = Routed(stats, self._experts(chosen_nE), mismatched)
        return weights_NE, chosen_NE

    def _experts(self, chosen_nE: torch.Tensor) -> torch.Tensor:
        """Return the chosen experts int64 [n, k], in no particular order."""
        return chosen_nE.to(torch.float32).topk(self.topk, dim=-1).indices

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Do nothing, as the models have no such bias; Megatron's own would be compiled."""
