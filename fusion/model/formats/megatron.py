"""Describe Megatron-Core's GPTModel as a parameter table: its names, shapes and order, as `LocalParam`s.

A plan compares only boxes of the global (Hugging Face) tensors, so another engine's format is another list of parts.
The local tensors are those of `fusion.model.table`, uncut, under Megatron's names (`_MegatronTable.names`): layers and
experts are numbered from zero on each rank. They differ (l: a rank's share) in

    self_attention.linear_qkv            [Hl + 2 Kl heads of C, D]  the q, k and v rows of a KV group, then those of the
                                                                    next; cut evenly, also inside a group
    self_attention.q_layernorm           [C] or [Hl C]              follows linear_proj; k_layernorm alike
    self_attention.linear_q_down_proj    [Q / tp, D]                latent attention: cut by TP
    self_attention.linear_kv_down_proj   [(R + P) / tp, D]          in the order of Hugging Face, which the attention
                                                                    supplied rotates
    mlp.router.expert_bias               [E]                        as layers.n.router.expert_bias on the ranks of other
                                                                    stages
    layers.p.…                                                      layers that predict further tokens: embedded names

Invariants: over the ranks of a layout the parts cover every element of every global tensor; every element of a local
tensor belongs to exactly one part. Stages are those of the embedded format (Megatron-Core's own need a layout where
their number does not divide that of the layers); Megatron-Core knows no other placement of experts than the order of
their numbers."""

from collections.abc import Iterator

from fusion.model.config import ModelConfig
from fusion.model.local_param import LocalParam
from fusion.model.parallel import Parallel
from fusion.model.shares import Rows, stacked, whole, within
from fusion.model.spec import GroupedQuery, Latent
from fusion.model.table import LocalNames, Table, predictor_params


def local_params(config: ModelConfig, parallel: Parallel, rank: int) -> tuple[LocalParam, ...]:
    """Return the parameters that `GPTModel.named_parameters` has on ``rank``, in the order of the forward pass; and
    those that this rank holds and does not compute with.

    The tensor-parallel cut differs from the embedded trainer's in the low-rank projections of latent attention, which
    are cut here; and in `linear_qkv`, if TP exceeds the number of KV groups: each rank then holds an even share of the
    fused rows and gathers them to compute.
    Raise ValueError: Megatron does not divide the model so (`misfit`)."""
    assert not config.num_labels, "a reward model is not trained"
    if problem := misfit(config, parallel):
        raise ValueError(problem)
    return (*_MegatronTable(config, parallel, rank).params(), *predictor_params(config, parallel, rank))


def misfit(config: ModelConfig, parallel: Parallel) -> str | None:
    """Return what a layout's TP does not divide though Megatron requires it, with both numbers, or None."""
    for rows, what in _cut_rows(config):
        if rows % parallel.tp:
            return f"tp={parallel.tp} does not divide the {rows} rows of {what}, as Megatron requires"
    return None


def _cut_rows(config: ModelConfig) -> list[tuple[int, str]]:
    """Return the matrices of attention whose rows TP cuts regardless of heads: (rows, name)."""
    match config.attention:
        case GroupedQuery() as spec:
            return [((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, "linear_qkv")]
        case Latent() as spec:
            low_rank = [] if spec.q_rank is None else [(spec.q_rank, "linear_q_down_proj (q_lora_rank)")]
            return [*low_rank, (spec.cached_width, "linear_kv_down_proj (kv_lora_rank + qk_rope_head_dim)")]


class _MegatronTable(Table):
    names = LocalNames(
        embed="embedding.word_embeddings.weight",
        head="output_layer.weight",
        tied_head="output_layer.weight",
        norm="decoder.final_layernorm.weight",
        input_norm="input_layernorm.weight",
        attention_norm="self_attention.output_layernorm.weight",
        post_norm="pre_mlp_layernorm.weight",
        mlp_norm="mlp.output_layernorm.weight",
        qkv="self_attention.linear_qkv.weight",
        qkv_bias="self_attention.linear_qkv.bias",
        q_norm="self_attention.q_layernorm.weight",
        k_norm="self_attention.k_layernorm.weight",
        out="self_attention.linear_proj.weight",
        out_bias="self_attention.linear_proj.bias",
        q="self_attention.linear_q_proj.weight",
        q_a="self_attention.linear_q_down_proj.weight",
        q_a_norm="self_attention.q_layernorm.weight",
        q_b="self_attention.linear_q_up_proj.weight",
        kv_a="self_attention.linear_kv_down_proj.weight",
        kv_a_norm="self_attention.kv_layernorm.weight",
        kv_b="self_attention.linear_kv_up_proj.weight",
        gate_up="linear_fc1.weight",
        down="linear_fc2.weight",
        router="mlp.router.weight",
        correction="mlp.router.expert_bias",
        correction_elsewhere="router.expert_bias",
        expert="mlp.experts.local_experts.{slot}",
        shared="mlp.shared_experts",
        shared_gate="mlp.shared_experts.gate_weight",
    )

    def path(self, index: int) -> str:
        return f"decoder.layers.{index - self.own_layers.start}"

    def grouped_query(self, spec: GroupedQuery, hf: str, local: str) -> Iterator[LocalParam]:
        names, c = self.names, spec.head_dim
        num_rows = (spec.num_heads + 2 * spec.num_kv_heads) * c
        share = self.of_tp(num_rows)
        yield stacked(f"{local}.{names.qkv}", within(_fused_qkv(hf, "weight", spec), share), self.hidden)
        if spec.qkv_bias:
            yield stacked(f"{local}.{names.qkv_bias}", within(_fused_qkv(hf, "bias", spec), share))
        yield from self.output(f"{hf}.o_proj", local, self.of_tp(spec.num_heads * c), spec.out_bias)
        for x, name, heads in (("q", names.q_norm, spec.num_heads), ("k", names.k_norm, spec.num_kv_heads)):
            match spec.qk_norm:
                case "head":
                    yield whole(f"{local}.{name}", f"{hf}.{x}_norm.weight", (c,))
                case "projection":
                    yield stacked(f"{local}.{name}", [(f"{hf}.{x}_norm.weight", self.of_tp(heads * c))])

    def down(self, name: str, hf_name: str, rank: int) -> LocalParam:
        return stacked(name, [(hf_name, self.of_tp(rank))], self.hidden)


def _fused_qkv(hf: str, kind: str, spec: GroupedQuery) -> Iterator[Rows]:
    """Yield all rows of the fused projection, KV group by KV group."""
    c, queries = spec.head_dim, spec.num_heads // spec.num_kv_heads
    for group in range(spec.num_kv_heads):
        yield f"{hf}.q_proj.{kind}", (group * queries * c, (group + 1) * queries * c)
        yield f"{hf}.k_proj.{kind}", (group * c, (group + 1) * c)
        yield f"{hf}.v_proj.{kind}", (group * c, (group + 1) * c)
