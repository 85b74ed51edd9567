"""Attend to whole sequences whose rows are split over the ranks of context parallelism, by exchanging rows for heads.

    q, k, v of this rank's rows, all heads ─ all-to-all ─► all rows, its share of the heads ─ attend ─► all-to-all ─►

DeepSpeed-Ulysses (arXiv 2309.14509, section 3). Outside of attention a rank computes its rows alone. Key/value heads
are repeated where the ranks do not divide them; latents, which all heads share, are gathered instead. Whatever
attends to whole sequences does so unchanged inside (`Attend`), with this rank's heads.

Invariants: rows are in the order of the ranks, split as evenly as possible (`shard_sizes`); what is received is in rank
order and gradients are summed in it, so a pass computes the same bits every time."""

from math import gcd

import torch

from fusion.model.attention import Attend, Pair, Up
from fusion.model.collectives import gather_shards, heads_to_rows, rows_to_heads, shard_range, shard_sizes
from fusion.model.mesh import Mesh


def context_rows(rows: int, mesh: Mesh) -> slice:
    """Return which of the rows of a micro-batch this rank of context parallelism computes, with its TP group."""
    own = shard_range(rows, mesh.parallel.cp, mesh.cp_rank)
    return slice(own.start, own.stop)


def over_context(attend: Attend, rows: int, mesh: Mesh) -> Attend:
    """Return what attends in a pass over a share of ``rows`` as ``attend`` does in one over all of them."""
    return attend if mesh.cp_group is None else UlyssesAttention(attend, rows, mesh)


class UlyssesAttention:
    """Implement `Attend` for this rank's rows (`context_rows`) by ``inner``, which attends to all ``rows`` with a
    share of the heads."""

    def __init__(self, inner: Attend, rows: int, mesh: Mesh):
        assert mesh.cp_group is not None
        self.inner, self.mesh, self.group = inner, mesh, mesh.cp_group
        self.sizes = shard_sizes(rows, mesh.parallel.cp)

    def __call__(self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor) -> torch.Tensor:
        ranks, kv_heads = len(self.sizes), k_NKC.shape[1]
        repeats = ranks // gcd(ranks, kv_heads)
        if repeats > 1:
            # expanded, so that gradients are summed in a fixed order: those of indices are not on every card
            k_NKC, v_NKC = (x.unsqueeze(2).expand(-1, -1, repeats, -1).flatten(1, 2) for x in (k_NKC, v_NKC))
        q, k, v = (rows_to_heads(heads, self.sizes, self.group) for heads in (q_NHC, k_NKC, v_NKC))
        return heads_to_rows(self.inner(layer, q, k, v), self.sizes, self.group)

    def latent(self, layer: int, q: Pair, latent: Pair, up: Up) -> torch.Tensor:
        widths = [part.shape[-1] for part in q]
        nope, rotated = rows_to_heads(torch.cat(q, dim=-1), self.sizes, self.group).split(widths, dim=-1)
        ranks = [part.shape[-1] for part in latent]
        compressed, key = gather_shards(torch.cat(latent, dim=-1), self.sizes, self.group).split(ranks, dim=-1)
        own = shard_range(q[0].shape[1], len(self.sizes), self.mesh.cp_rank)
        out = self.inner.latent(layer, (nope, rotated), (compressed, key), up.of_heads(own))
        return heads_to_rows(out, self.sizes, self.group)
