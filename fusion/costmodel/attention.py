"""Compute what attention costs by its kind: elements of the KV cache, elements of activations, operations of a pair.

A pair is a query and a key that it attends to, in all heads of a layer. Latent attention (MLA; DeepSeek-V2, arXiv
2405.04434, section 2.1) computes keys and values of all heads from the latents in training and prefill, where many
queries use them. In decoding their projections are absorbed into queries and outputs: every head attends to the latents
themselves, which are read once for all heads, and a pair takes more operations. A token takes as many operations for
the absorbed projections as for the projections: `Roofline` counts those with the weights."""

from dataclasses import dataclass
from math import gcd

from fusion.model.spec import AttentionSpec, GroupedQuery, Latent


@dataclass(frozen=True)
class AttentionCost:
    """Costs of one layer's attention, before it is cut over TP.

    ``kv_elements``: of the KV cache per token. ``kv_heads``: the heads they are cut by; 1: every TP rank holds all.
    ``width``: elements of queries, keys and values per token; ``ends``: of queries and of outputs; ``decode_ends``: in
    decoding. ``pair_flops``: operations of a pair in training and prefill; ``decode_pair_flops``: in decoding and in
    the verification of drafts."""

    kv_elements: int
    kv_heads: int
    width: int
    ends: tuple[int, int]
    decode_ends: tuple[int, int]
    pair_flops: float
    decode_pair_flops: float

    def kv_elements_of_rank(self, tp: int, dcp: int = 1) -> int:
        """Return the elements of the KV cache per token on the TP rank that has most, of tokens that ``dcp`` ranks
        share evenly."""
        return -(-self.kv_elements // self.kv_heads * -(-self.kv_heads // tp) // dcp)

    def repeated_elements(self, tp: int, cp: int) -> int:
        """Return the elements per token of the keys and values, or of the latents, that a TP rank sends to the ranks of
        context parallelism: one for each of these, where there are fewer heads."""
        return self.kv_elements_of_rank(tp) * cp // gcd(cp, max(1, self.kv_heads // tp))

    def exchanged_elements(self, tp: int, cp: int) -> float:
        """Return the elements that a rank sends to others per row of its own, for one layer of a pass."""
        return (sum(self.ends) / tp + self.repeated_elements(tp, cp)) * (cp - 1) / cp

    def shared_elements(self, tp: int, dcp: int) -> float:
        """Return the elements that a rank of decode context parallelism sends to others per token, for one layer: the
        queries of its heads to each, and what the heads of each attend to of its tokens. An upper bound: prompts that
        are computed whole exchange nothing."""
        return sum(self.decode_ends) / tp * (dcp - 1)


def attention_cost(spec: AttentionSpec) -> AttentionCost:
    match spec:
        case GroupedQuery(num_heads=heads, num_kv_heads=kv_heads, head_dim=c):
            pair_flops = 4.0 * heads * c
            return AttentionCost(
                kv_elements=2 * kv_heads * c,
                kv_heads=kv_heads,
                width=(heads + 2 * kv_heads) * c,
                ends=(heads * c, heads * c),
                decode_ends=(heads * c, heads * c),
                pair_flops=pair_flops,
                decode_pair_flops=pair_flops,
            )
        case Latent(num_heads=heads, kv_rank=rank, rope_dim=rope, head_dim=c, value_dim=value):
            return AttentionCost(
                kv_elements=spec.cached_width,
                kv_heads=1,
                width=heads * (2 * c + value),
                ends=(heads * c, heads * value),
                decode_ends=(heads * (rank + rope), heads * rank),
                pair_flops=2.0 * heads * (c + value),
                decode_pair_flops=2.0 * heads * (rank + rope + rank),
            )
