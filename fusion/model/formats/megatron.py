"""Describe Megatron-Core's GPTModel as a parameter table: its names, shapes and order, as `LocalParam`s.

A plan compares only boxes of the global (Hugging Face) tensors, so another engine's format is another list of parts.
Local tensors of a rank (l: its share), with layers and experts numbered from zero on each rank. Which of them a layer
has, its `LayerSpec` says:

    embedding.word_embeddings.weight                    [Vl, D]
    decoder.layers.i.input_layernorm.weight             [D]
    decoder.layers.i.self_attention.linear_qkv.weight   [Hl + 2 Kl heads of C, D]   the q, k and v rows of a KV group,
                                                        then those of the next; cut evenly, also inside a group
    decoder.layers.i.self_attention.linear_qkv.bias     [Hl + 2 Kl heads of C]
    decoder.layers.i.self_attention.linear_proj.weight  [D, Hl C]
    decoder.layers.i.self_attention.linear_proj.bias    [D]
    decoder.layers.i.self_attention.q_layernorm.weight  [C] or [Hl C]               (k_layernorm alike)

    latent attention, in place of linear_qkv and the norms of q and k:
    decoder.layers.i.self_attention.linear_q_down_proj.weight    [Q / tp, D]        low-rank queries; else
    decoder.layers.i.self_attention.q_layernorm.weight           [Q]
    decoder.layers.i.self_attention.linear_q_up_proj.weight      [Hl C, Q]          linear_q_proj [Hl C, D]
    decoder.layers.i.self_attention.linear_kv_down_proj.weight   [(R + P) / tp, D]  in the order of Hugging Face, which
    decoder.layers.i.self_attention.kv_layernorm.weight          [R]                the attention supplied rotates
    decoder.layers.i.self_attention.linear_kv_up_proj.weight     [Hl (C - P + V), R]

    decoder.layers.i.self_attention.output_layernorm.weight      [D]                sandwich norms (mlp alike)
    decoder.layers.i.pre_mlp_layernorm.weight           [D]
    decoder.layers.i.mlp.linear_fc1.weight              [2 Fl, D]                   gate rows over up rows
    decoder.layers.i.mlp.linear_fc2.weight              [D, Fl]
    decoder.layers.i.mlp.router.weight                  [E, D]
    decoder.layers.i.mlp.router.expert_bias             [E]                         in float32, on the card apart; as
                                                        layers.n.router.expert_bias on the ranks of other stages
    decoder.layers.i.mlp.experts.local_experts.e.linear_fc1.weight, linear_fc2      as mlp, cut by expert-TP
    decoder.layers.i.mlp.shared_experts.linear_fc1.weight, linear_fc2               as mlp
    decoder.layers.i.mlp.shared_experts.gate_weight     [1, D]
    decoder.final_layernorm.weight                      [D]                         last stage
    output_layer.weight                                 [Vl, D]                     last stage
    layers.p.…                                          layers that predict further tokens, as in the embedded format

Invariants: over the ranks of a layout the parts cover every element of every global tensor; every element of a local
tensor belongs to exactly one part. Stages are those of the embedded format (Megatron-Core's own need a layout where
their number does not divide that of the layers); Megatron-Core knows no other placement of experts than the order of
their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusion.model.config import ModelConfig
from fusion.model.local_param import LocalParam
from fusion.model.parallel import Parallel
from fusion.model.shares import RankShares, Rows, Span, columns, stacked, whole, within
from fusion.model.spec import Dense, GroupedQuery, Latent, LayerSpec, Sparse, SwiGLUNames
from fusion.model.table import EMBEDDING, predictor_params

SWIGLU = SwiGLUNames()


def local_params(config: ModelConfig, parallel: Parallel, rank: int) -> tuple[LocalParam, ...]:
    """Return the parameters that `GPTModel.named_parameters` has on ``rank``, in the order of the forward pass; and
    those that this rank holds and does not compute with.

    The tensor-parallel cut differs from the embedded trainer's in the low-rank projections of latent attention, which
    are cut here; and in `linear_qkv`, if TP exceeds the number of KV groups: each rank then holds an even share of the
    fused rows and gathers them to compute.

    Raises:
        ValueError: Megatron does not divide the model so (`misfit`).
    """
    assert not config.num_labels, "a reward model is not trained"
    if problem := misfit(config, parallel):
        raise ValueError(problem)
    return (*_Table(config, parallel, rank).params(), *predictor_params(config, parallel, rank))


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


class _Table(RankShares):
    def __init__(self, config: ModelConfig, parallel: Parallel, rank: int):
        super().__init__(parallel, rank)
        self.config, self.hidden, self.names = config, config.hidden_size, config.family_spec.names

    def params(self) -> Iterator[LocalParam]:
        config, last = self.config, self.stage == self.parallel.pp - 1
        vocabulary = [(EMBEDDING, (0, config.vocab_size))]
        if self.stage == 0:
            yield self.rows("embedding.word_embeddings", vocabulary)
        own_layers = self.parallel.layers(config.num_layers, self.stage)
        for layer, spec in enumerate(config.layers):
            hf = f"model.layers.{layer}"
            if layer in own_layers:
                params = self.layer(f"decoder.layers.{layer - own_layers.start}", hf, spec)
            else:
                params = self.correction(f"layers.{layer}.router", hf, spec)
            for param in params:
                yield replace(param, layer=layer)
        if last:
            yield whole("decoder.final_layernorm.weight", "model.norm.weight", (config.hidden_size,))
        if last and not config.tie_embeddings:
            yield self.rows("output_layer", [("lm_head.weight", (0, config.vocab_size))])
        elif last and self.stage:
            yield self.rows("output_layer", vocabulary)

    def layer(self, name: str, hf: str, spec: LayerSpec) -> Iterator[LocalParam]:
        sandwich = self.names.sandwich
        yield self.norm(f"{name}.input_layernorm", f"{hf}.input_layernorm.weight")
        match spec.attention:
            case GroupedQuery():
                yield from self.grouped_query(f"{name}.self_attention", f"{hf}.self_attn", spec.attention)
            case Latent():
                yield from self.latent(f"{name}.self_attention", f"{hf}.self_attn", spec.attention)
        if spec.sandwich:
            yield self.norm(f"{name}.self_attention.output_layernorm", f"{hf}.{sandwich.attention}")
        before_mlp = sandwich.mlp_input if spec.sandwich else "post_attention_layernorm.weight"
        yield self.norm(f"{name}.pre_mlp_layernorm", f"{hf}.{before_mlp}")
        match spec.mlp:
            case Dense():
                yield from self.mlp(f"{name}.mlp", f"{hf}.mlp", share=self.of_tp(spec.mlp.width))
            case Sparse():
                yield from self.sparse(f"{name}.mlp", hf, spec)
        if spec.sandwich:
            yield self.norm(f"{name}.mlp.output_layernorm", f"{hf}.{sandwich.mlp}")

    def grouped_query(self, name: str, hf: str, spec: GroupedQuery) -> Iterator[LocalParam]:
        c = spec.head_dim
        yield self.rows(f"{name}.linear_qkv", list(self.fused_qkv(hf, "weight", spec)))
        if spec.qkv_bias:
            yield self.vector(f"{name}.linear_qkv.bias", list(self.fused_qkv(hf, "bias", spec)))
        share = self.of_tp(spec.num_heads * c)
        yield columns(f"{name}.linear_proj.weight", f"{hf}.o_proj.weight", self.hidden, share)
        if spec.out_bias:
            yield whole(f"{name}.linear_proj.bias", f"{hf}.o_proj.bias", (self.hidden,))
        for x, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
            local, hf_name = f"{name}.{x}_layernorm.weight", f"{hf}.{x}_norm.weight"
            match spec.qk_norm:
                case "head":
                    yield whole(local, hf_name, (c,))
                case "projection":
                    yield self.vector(local, [(hf_name, (0, heads * c))])

    def latent(self, name: str, hf: str, spec: Latent) -> Iterator[LocalParam]:
        heads, q_rows = spec.num_heads, spec.num_heads * spec.head_dim
        if spec.q_rank is None:
            yield self.rows(f"{name}.linear_q_proj", [(f"{hf}.q_proj.weight", (0, q_rows))])
        else:
            down, up = f"{name}.linear_q_down_proj", f"{name}.linear_q_up_proj"
            yield self.rows(down, [(f"{hf}.q_a_proj.weight", (0, spec.q_rank))])
            yield whole(f"{name}.q_layernorm.weight", f"{hf}.q_a_layernorm.weight", (spec.q_rank,))
            yield self.rows(up, [(f"{hf}.q_b_proj.weight", (0, q_rows))], spec.q_rank)
        kv_a = f"{hf}.kv_a_proj_with_mqa.weight"
        yield self.rows(f"{name}.linear_kv_down_proj", [(kv_a, (0, spec.cached_width))])
        yield whole(f"{name}.kv_layernorm.weight", f"{hf}.kv_a_layernorm.weight", (spec.kv_rank,))
        kv_b = [(f"{hf}.kv_b_proj.weight", (0, heads * (spec.nope_dim + spec.value_dim)))]
        yield self.rows(f"{name}.linear_kv_up_proj", kv_b, spec.kv_rank)
        share = self.of_tp(heads * spec.value_dim)
        yield columns(f"{name}.linear_proj.weight", f"{hf}.o_proj.weight", self.hidden, share)

    def sparse(self, name: str, hf: str, spec: LayerSpec) -> Iterator[LocalParam]:
        mlp, names, hidden = spec.mlp, self.names, self.hidden
        assert isinstance(mlp, Sparse)
        yield whole(f"{name}.router.weight", f"{hf}.{names.router}", (mlp.num_experts, hidden))
        yield from self.correction(f"{name}.router", hf, spec)
        for slot, expert in enumerate(self.experts(mlp.num_experts)):
            local, hf_expert = f"{name}.experts.local_experts.{slot}", f"{hf}.{names.experts}.{expert}"
            for param in self.mlp(local, hf_expert, share=self.of_etp(mlp.width), names=names.expert, expert=True):
                yield replace(param, expert_index=expert)
        if mlp.shared:
            shared = f"{name}.shared_experts"
            yield from self.mlp(shared, f"{hf}.{names.shared}", share=self.of_tp(mlp.shared.width))
            if mlp.shared.gated:
                yield whole(f"{shared}.gate_weight", f"{hf}.{names.shared_gate}", (1, hidden))

    def correction(self, name: str, hf: str, spec: LayerSpec) -> Iterator[LocalParam]:
        """Yield the correction bias of a layer's router, which every rank holds, if it has one."""
        if isinstance(spec.mlp, Sparse) and spec.mlp.router.correction:
            bias = whole(f"{name}.expert_bias", f"{hf}.{self.names.correction}", (spec.mlp.num_experts,))
            yield replace(bias, storage="card", float32=True)

    def mlp(
        self, name: str, hf: str, *, share: Span, names: SwiGLUNames = SWIGLU, expert: bool = False
    ) -> Iterator[LocalParam]:
        gate_up = [(f"{hf}.{half}", share) for half in (names.gate, names.up)]
        yield stacked(f"{name}.linear_fc1.weight", gate_up, self.hidden, expert=expert)
        yield columns(f"{name}.linear_fc2.weight", f"{hf}.{names.down}", self.hidden, share, expert=expert)

    def fused_qkv(self, hf: str, kind: str, spec: GroupedQuery) -> Iterator[Rows]:
        """Yield all rows of the fused projection, KV group by KV group."""
        c, queries = spec.head_dim, spec.num_heads // spec.num_kv_heads
        for group in range(spec.num_kv_heads):
            yield f"{hf}.q_proj.{kind}", (group * queries * c, (group + 1) * queries * c)
            yield f"{hf}.k_proj.{kind}", (group * c, (group + 1) * c)
            yield f"{hf}.v_proj.{kind}", (group * c, (group + 1) * c)

    def norm(self, name: str, hf: str) -> LocalParam:
        return whole(f"{name}.weight", hf, (self.hidden,))

    def rows(self, name: str, stack: list[Rows], width: int | None = None) -> LocalParam:
        """Describe this TP rank's share of the stacked rows of matrices of ``width`` columns; None: of the hidden
        size."""
        return stacked(f"{name}.weight", within(stack, self.of_tp(_num_rows(stack))), width or self.hidden)

    def vector(self, name: str, stack: list[Rows]) -> LocalParam:
        """Describe this TP rank's share of the stacked vectors."""
        return stacked(name, within(stack, self.of_tp(_num_rows(stack))))


def _num_rows(stack: list[Rows]) -> int:
    return sum(stop - start for _, (start, stop) in stack)
