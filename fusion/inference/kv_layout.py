"""Describe what one token keeps in the KV cache of one layer, on one rank. Pure.

    keys and values   2 parts of K heads     pool [2 · blocks, K, block_size, C]
    latents           1 part of one head     pool [blocks, 1, block_size, kv_rank + rope_dim]

With latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) a token keeps one vector for all heads, which is its
key, and whose first ``value_width`` channels are its value. Memory, copies, parking and prefix blocks need only the
shape.

Ranks of a TP group share the heads of keys and values. A latent belongs to all heads, so each of these ranks holds,
parks and pools a copy of its own, as do ranks that share one key head, unless they share the tokens (`Context`): bytes
are counted by rank, tokens by TP group."""

from dataclasses import dataclass

from fusion.model.spec import AttentionSpec, Latent


@dataclass(frozen=True)
class KVLayout:
    """``parts`` vectors per token and head, of ``width`` channels each; attention sums the first ``value_width``
    channels of the last part."""

    parts: int
    heads: int
    width: int
    value_width: int

    @classmethod
    def of(cls, attention: AttentionSpec, tp: int) -> "KVLayout":
        """Return the layout of one of ``tp`` ranks."""
        if isinstance(attention, Latent):
            return cls(1, 1, width=attention.cached_width, value_width=attention.kv_rank)
        heads, width = max(1, attention.num_kv_heads // tp), attention.head_dim
        return cls(2, heads, width=width, value_width=width)

    @property
    def elements(self) -> int:
        """Number of elements per token and layer."""
        return self.parts * self.heads * self.width

    @property
    def is_latent(self) -> bool:
        return self.parts == 1

    @property
    def latent_width(self) -> int | None:
        """Number of a latent's channels that are its value; None: the pool holds keys and values."""
        return self.value_width if self.is_latent else None

    def absorbs(self, rows: int, tokens: int, head_dim: int) -> bool:
        """Return whether queries of ``rows`` rows over ``tokens`` latents of one sequence take fewer multiplications
        with absorbed projections than over expanded keys and values. Values are counted as as wide as the channels of
        a key without position encoding."""
        nope = head_dim - (self.width - self.value_width)
        absorbed = rows * 2 * self.value_width * nope + rows * tokens * (self.width + self.value_width)
        expanded = tokens * 2 * self.value_width * nope + rows * tokens * (head_dim + nope)
        return absorbed < expanded

    def pool_shape(self, blocks: int, block_size: int) -> tuple[int, int, int, int]:
        """Return the shape of ``blocks`` blocks of one layer: all keys before all values."""
        return self.parts * blocks, self.heads, block_size, self.width
