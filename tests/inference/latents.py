"""The projection of latents to keys and values as plain matrices."""

from __future__ import annotations

import torch


class Up:
    """``keys`` [H, nope, R] and ``values_of`` [H, V, R] of random numbers: what a layer offers the engine."""

    def __init__(self, draw: torch.Generator, *, heads: int, nope: int, rank: int, value: int, dtype: torch.dtype):
        self.keys = torch.randn(heads, nope, rank, generator=draw, dtype=torch.float64).to(dtype)
        self.values_of = torch.randn(heads, value, rank, generator=draw, dtype=torch.float64).to(dtype)
        self.softmax_scale = 0.4 * rank**-0.5

    def expand(self, latent_NL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads, nope, rank = self.keys.shape
        compressed, rope = latent_NL.split([rank, latent_NL.shape[1] - rank], dim=1)
        keys = torch.einsum("nr,hcr->nhc", compressed, self.keys)
        keys = torch.cat([keys, rope.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
        return keys, torch.einsum("nr,hvr->nhv", compressed, self.values_of)

    def absorb(self, q_NHC: torch.Tensor) -> torch.Tensor:
        nope, rope = q_NHC.split([self.keys.shape[1], q_NHC.shape[2] - self.keys.shape[1]], dim=2)
        return torch.cat([torch.einsum("nhc,hcr->nhr", nope, self.keys), rope], dim=-1)

    def values(self, out_NHR: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nhr,hvr->nhv", out_NHR, self.values_of)
