"""Divide the KV of each sequence over the ranks of decode context parallelism, and attend to all of it.

    block j of a sequence, of c pages, page r on rank r      tokens   0 … P-1 | P … 2P-1 | … of block 0, then block 1, …
                                                             rank        0    |    1     | …

    paged rows    q of this rank's heads ─ all-gather ─► of all ranks' heads ─ attend to own pages ─► out, log-sum-exp
                  ─ all-to-all ─► those of all pages for this rank's heads ─ merge in rank order ─►
    long chunks   own pages of the sequence ─ all-gather ─► its KV in order ─ attend with this rank's heads ─►

As vLLM's `decode_context_parallel_size`, and attention in Helix (arXiv 2507.07120). A token's KV is computed by all of
these neighbouring TP ranks, whose keys and values (or latents) are the same, and stored by one. Prompts that are
computed whole attend to no cache and exchange nothing. All ranks have the same schedule and number blocks alike, so
what manages, names, parks and pools blocks does not know of pages: each rank does so with its own.

Invariants (tests/inference/test_context.py): each token is on exactly one rank; a rank's part of a sequence's first
tokens fills its first pages, without gaps; partial results merged are those of one softmax over all tokens."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from fusion.model import Mesh
from fusion.model.collectives import gather_shards, rows_to_heads, sum_in_order


@dataclass(frozen=True)
class Context:
    """One rank's part of every sequence. ``page_size``: tokens of a block on each of ``ranks``; ``group``: None for one
    rank."""

    ranks: int
    rank: int
    page_size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: Mesh, block_size: int) -> "Context":
        """Divide blocks of ``block_size`` tokens."""
        ranks = mesh.parallel.dcp
        if block_size % ranks:
            raise ValueError(
                f"rollout.engine.block_size={block_size}: expected a multiple of parallel.infer.dcp={ranks}"
            )
        return cls(ranks, mesh.dcp_rank, block_size // ranks, mesh.dcp_group)

    @property
    def is_shared(self) -> bool:
        return self.ranks > 1

    def count_own(self, tokens: np.ndarray) -> np.ndarray:
        """Count those of a sequence's first ``tokens`` that this rank stores; int64 of any shape."""
        blocks, rest = np.divmod(tokens, self.ranks * self.page_size)
        return blocks * self.page_size + np.clip(rest - self.rank * self.page_size, 0, self.page_size)

    def is_own(self, positions: np.ndarray) -> np.ndarray:
        """Return where this rank stores the token, bool of the same shape."""
        return positions // self.page_size % self.ranks == self.rank

    def gather_heads(self, q_NHC: torch.Tensor) -> torch.Tensor:
        """Return the queries [N, ranks * H, C] of all ranks' heads."""
        assert self.group is not None
        by_rank = gather_shards(q_NHC, [len(q_NHC)] * self.ranks, self.group).unflatten(0, (self.ranks, -1))
        return by_rank.transpose(0, 1).flatten(1, 2).contiguous()

    def merge(self, out_NHV: torch.Tensor, lse_NH: torch.Tensor) -> torch.Tensor:
        """Return what this rank's heads attend to of all ranks' tokens, [N, H / ranks, V]. ``out_NHV``, ``lse_NH``:
        what all ranks' heads attend to of this rank's tokens, and the logarithm of the sum of the exponentiated scores,
        float32 (float64 of float64); -inf where this rank has none of a row's tokens."""
        assert self.group is not None
        width, dtype = out_NHV.shape[-1], out_NHV.dtype
        # one exchange: the bits of a sum travel as channels, as a narrow dtype would round it
        packed = torch.cat([out_NHV, lse_NH.unsqueeze(-1).view(dtype)], dim=-1)
        pieces = rows_to_heads(packed, [len(packed)] * self.ranks, self.group).unflatten(0, (self.ranks, -1))
        lse_rNh1 = pieces[..., width:].contiguous().view(lse_NH.dtype)
        return sum_in_order(pieces[..., :width] * lse_rNh1.softmax(0)).to(dtype)

    def gather_pages(self, kv: torch.Tensor) -> torch.Tensor:
        """Return blocks [n, heads, ranks * page_size, width] of pages [n, heads, page_size, width] of all ranks."""
        if self.group is None:
            return kv
        by_rank = gather_shards(kv, [len(kv)] * self.ranks, self.group).unflatten(0, (self.ranks, -1))
        return by_rank.permute(1, 2, 0, 3, 4).flatten(2, 3)
