"""Build the parameter table: which slice of which global tensor every rank holds, and how it is stored.

*Logical*: the model is a set of global tensors under their Hugging Face names. A `Part` names a box of one of them.
*Physical*: a rank stores parts inside local tensors, fused as its kernels require. The box inside the local tensor,
and whether it is stored transposed, is the other half of the `Part`. A reshard plan only compares logical boxes;
another engine's format is another list of parts.

Local tensors of a rank (suffix l: its shard under TP or expert-TP; i and e index the whole model's layers, those of
its pipeline stage, and experts, those of its EP rank). Which of them a layer has, its `LayerSpec` says:

    embed                           [Vl, D]            embed_tokens rows; first stage, and last where tied
    layers.i.input_norm             [D]
    layers.i.attention.qkv          [(Hl + 2 Kl) C, D] q, k and v rows, concatenated
    layers.i.attention.qkv_bias     [(Hl + 2 Kl) C]
    layers.i.attention.q_norm       [C] or [Hl C]      of a head, or of the rank's part of the projection
    layers.i.attention.k_norm       [C] or [Kl C]
    layers.i.attention.out          [D, Hl C]          o_proj columns
    layers.i.attention.out_bias     [D]
    layers.i.attention.q_a          [Q, D]             latent attention with low-rank queries; else
    layers.i.attention.q_a_norm     [Q]
    layers.i.attention.q_b          [Hl C, Q]          layers.i.attention.q [Hl C, D]
    layers.i.attention.kv_a         [R + P, D]         compressed keys and values, then the rotated shared key
    layers.i.attention.kv_a_norm    [R]
    layers.i.attention.kv_b         [Hl (C - P + V), R] of each head its unrotated keys, then its values
    layers.i.attention_norm         [D]                sandwich norms: of the output of attention, before the sum
    layers.i.post_norm              [D]                before the MLP
    layers.i.mlp_norm               [D]                sandwich norms: of the output of the MLP
    layers.i.mlp.gate_up            [2 Fl, D]          dense: gate rows, then up rows
    layers.i.mlp.down               [D, Fl]            dense
    layers.i.moe.router             [E, D]
    layers.i.moe.correction         [E]                on every rank, of all layers; in float32, on the card apart
    layers.i.moe.experts.e.gate_up  [2 Fl, D]
    layers.i.moe.experts.e.down     [D, Fl]
    layers.i.moe.shared.gate_up     [2 Fl, D]          cut by TP, as a dense MLP
    layers.i.moe.shared.down        [D, Fl]
    layers.i.moe.shared_gate        [1, D]
    norm                            [D]                last stage
    lm_head                         [Vl, D]            last stage; absent where embeddings are tied
    score                           [labels, D]        last stage of a reward model, in place of lm_head
    layers.p.…                                         layer p of those that predict further tokens: on the last stage,
                                                       on the host, each once; as the model's last layer, and
    layers.p.embed, .head           [Vl, D]
    layers.p.enorm, .hnorm          [D]
    layers.p.head_norm              [D]
    layers.p.eh_proj                [Dl, 2 D]          rows, split over TP

A matrix that is too large for a storage unit is cut along its rows into separate local tensors `name.0`, `name.1`, …,
whose outputs are concatenated. `kv_b` is cut only between heads. `LocalParam.storage` says where a local tensor lies:
most are trained and lie in the units that a switch moves.

Invariant: over the ranks of one grid the parts cover every element of every global tensor, and every element of a local
tensor belongs to exactly one part.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.model.config import ModelConfig
from fusion.model.local_param import LocalParam
from fusion.model.parallel import Parallel
from fusion.model.shares import RankShares, Span, columns, stacked, whole
from fusion.model.spec import AttentionSpec, Dense, GroupedQuery, Latent, Sparse, SwiGLUNames

EMBEDDING = "model.embed_tokens.weight"
"""The global tensor that the first stage and, where embeddings are tied, also the last stage holds."""


def kv_heads(config: ModelConfig, parallel: Parallel, tp_rank: int) -> tuple[int, int]:
    """Return the half-open range of key/value heads of a rank; ranks replicate heads where TP exceeds their number."""
    if parallel.tp <= config.num_kv_heads:
        per_rank = config.num_kv_heads // parallel.tp
        return tp_rank * per_rank, (tp_rank + 1) * per_rank
    head = tp_rank * config.num_kv_heads // parallel.tp
    return head, head + 1


def global_params(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the Hugging Face name of every tensor of a checkpoint to its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for param in local_params(config, Parallel(), 0):
        for part in param.parts:
            shapes[part.name] = part.shape
    return shapes


def float32_params(config: ModelConfig) -> frozenset[str]:
    """Return the names of the tensors of a checkpoint that are kept in float32."""
    table = local_params(config, Parallel(), 0)
    return frozenset(part.name for param in table if param.float32 for part in param.parts)


def local_params(
    config: ModelConfig, parallel: Parallel, rank: int, max_numel: int | None = None
) -> tuple[LocalParam, ...]:
    """Return the local tensors of ``rank`` in the order of the forward pass, matrices cut to ``max_numel`` elements."""
    rows = _TableRows(config, parallel, rank)
    first, last = rows.stage == 0, rows.stage == parallel.pp - 1
    head = "score" if config.num_labels else "embed" if config.tie_embeddings else "lm_head"
    table = [rows.vocabulary("embed", EMBEDDING)] if first else []
    own_layers = parallel.layers(config.num_layers, rows.stage)
    for layer in range(config.num_layers):
        table += rows.layer(layer) if layer in own_layers else rows.on_every_rank(layer)
    if last:
        table.append(whole("norm", "model.norm.weight", (config.hidden_size,)))
        if head == "score":
            table.append(whole("score", "score.weight", (config.num_labels, config.hidden_size)))
        elif head == "lm_head":
            table.append(rows.vocabulary("lm_head", "lm_head.weight"))
        elif not first:
            table.append(rows.vocabulary("embed", EMBEDDING))
    table += predictor_params(config, parallel, rank)
    if max_numel is None:
        return tuple(table)
    return tuple(block for param in table for block in param.cut(max_numel))


def predictor_params(config: ModelConfig, parallel: Parallel, rank: int) -> list[LocalParam]:
    """Return what ``rank`` holds of the layers that predict further tokens, uncut. No program computes with them, so
    every format holds them alike."""
    if parallel.coordinate("pp", rank) < parallel.pp - 1:
        return []
    rows = _TableRows(config, parallel, rank)
    return [param for layer in config.predictors for param in rows.predictor(layer)]


class _TableRows(RankShares):
    def __init__(self, config: ModelConfig, parallel: Parallel, rank: int):
        super().__init__(parallel, rank)
        self.config, self.hidden = config, config.hidden_size
        self.dp_rank, self.edp_rank = parallel.coordinate("dp", rank), parallel.coordinate("edp", rank)

    def vocabulary(self, name: str, hf_name: str) -> LocalParam:
        return stacked(name, [(hf_name, self.of_tp(self.config.vocab_size))], self.hidden)

    def layer(self, index: int) -> list[LocalParam]:
        spec, hidden = self.config.layer(index), self.config.hidden_size
        hf, local = f"model.layers.{index}", f"layers.{index}"
        names, mlp = self.config.family_spec.names.sandwich, spec.mlp
        rows = [
            whole(f"{local}.input_norm", f"{hf}.input_layernorm.weight", (hidden,)),
            *self.attention(spec.attention, hf=f"{hf}.self_attn", local=f"{local}.attention"),
        ]
        if spec.sandwich:
            rows.append(whole(f"{local}.attention_norm", f"{hf}.{names.attention}", (hidden,)))
        post_norm = names.mlp_input if spec.sandwich else "post_attention_layernorm.weight"
        rows.append(whole(f"{local}.post_norm", f"{hf}.{post_norm}", (hidden,)))
        if isinstance(mlp, Dense):
            rows += self.dense(mlp.width, hf=f"{hf}.mlp", local=f"{local}.mlp")
        else:
            rows += self.sparse(mlp, hf=hf, local=f"{local}.moe")
        if spec.sandwich:
            rows.append(whole(f"{local}.mlp_norm", f"{hf}.{names.mlp}", (hidden,)))
        return [replace(row, layer=index) for row in rows]

    def attention(self, spec: AttentionSpec, *, hf: str, local: str) -> list[LocalParam]:
        match spec:
            case GroupedQuery():
                return self.grouped_query(spec, hf=hf, local=local)
            case Latent():
                return self.latent(spec, hf=hf, local=local)

    def on_every_rank(self, index: int) -> list[LocalParam]:
        """Return what ranks of other stages hold of a layer: its correction bias, if it has one."""
        mlp = self.config.layer(index).mlp
        if isinstance(mlp, Dense) or not mlp.router.correction:
            return []
        correction = self.correction(mlp, hf=f"model.layers.{index}", local=f"layers.{index}.moe")
        return [replace(correction, layer=index)]

    def predictor(self, index: int) -> list[LocalParam]:
        """Return the local tensors of a layer that predicts further tokens (DeepSeek-V3, arXiv 2412.19437, section
        2.2), of which only the first replica holds any."""
        hf, local, hidden = f"model.layers.{index}", f"layers.{index}", self.config.hidden_size
        rows = [
            self.vocabulary(f"{local}.embed", f"{hf}.embed_tokens.weight"),
            whole(f"{local}.enorm", f"{hf}.enorm.weight", (hidden,)),
            whole(f"{local}.hnorm", f"{hf}.hnorm.weight", (hidden,)),
            self.projection(f"{local}.eh_proj", f"{hf}.eh_proj.weight"),
            *self.layer(index),
            whole(f"{local}.head_norm", f"{hf}.shared_head.norm.weight", (hidden,)),
            self.vocabulary(f"{local}.head", f"{hf}.shared_head.head.weight"),
        ]
        held = (row for row in rows if (self.edp_rank if row.expert else self.dp_rank) == 0)
        return [replace(row, storage="host", layer=index) for row in held]

    def projection(self, name: str, hf_name: str) -> LocalParam:
        """Return this rank's rows of a predictor's projection, as equal a share as TP allows."""
        hidden, tp = self.hidden, self.parallel.tp
        share = self.tp_rank * hidden // tp, (self.tp_rank + 1) * hidden // tp
        return stacked(name, [(hf_name, share)], 2 * hidden)

    def grouped_query(self, spec: GroupedQuery, *, hf: str, local: str) -> list[LocalParam]:
        c = spec.head_dim
        first_kv, end_kv = kv_heads(self.config, self.parallel, self.tp_rank)
        q_rows, kv_rows = self.of_tp(spec.num_heads * c), (first_kv * c, end_kv * c)
        shares = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        weights = [(f"{hf}.{x}_proj.weight", share) for x, share in shares.items()]
        rows = [stacked(f"{local}.qkv", weights, self.hidden)]
        if spec.qkv_bias:
            biases = [(f"{hf}.{x}_proj.bias", share) for x, share in shares.items()]
            rows.append(stacked(f"{local}.qkv_bias", biases))
        for x in ("q", "k") if spec.qk_norm != "none" else ():
            name, hf_name = f"{local}.{x}_norm", f"{hf}.{x}_norm.weight"
            if spec.qk_norm == "head":
                rows.append(whole(name, hf_name, (c,)))
            else:
                rows.append(stacked(name, [(hf_name, shares[x])]))
        rows.append(columns(f"{local}.out", f"{hf}.o_proj.weight", self.hidden, q_rows))
        if spec.out_bias:
            rows.append(whole(f"{local}.out_bias", f"{hf}.o_proj.bias", (self.hidden,)))
        return rows

    def latent(self, spec: Latent, *, hf: str, local: str) -> list[LocalParam]:
        hidden, heads = self.config.hidden_size, spec.num_heads
        q_rows = self.of_tp(heads * spec.head_dim)
        if spec.q_rank is None:
            rows = [stacked(f"{local}.q", [(f"{hf}.q_proj.weight", q_rows)], hidden)]
        else:
            rows = [
                whole(f"{local}.q_a", f"{hf}.q_a_proj.weight", (spec.q_rank, hidden)),
                whole(f"{local}.q_a_norm", f"{hf}.q_a_layernorm.weight", (spec.q_rank,)),
                stacked(f"{local}.q_b", [(f"{hf}.q_b_proj.weight", q_rows)], spec.q_rank),
            ]
        channels = spec.nope_dim + spec.value_dim
        kv_rows = [(f"{hf}.kv_b_proj.weight", self.of_tp(heads * channels))]
        return [
            *rows,
            whole(f"{local}.kv_a", f"{hf}.kv_a_proj_with_mqa.weight", (spec.cached_width, hidden)),
            whole(f"{local}.kv_a_norm", f"{hf}.kv_a_layernorm.weight", (spec.kv_rank,)),
            replace(stacked(f"{local}.kv_b", kv_rows, spec.kv_rank), row_group=channels),
            columns(f"{local}.out", f"{hf}.o_proj.weight", hidden, self.of_tp(heads * spec.value_dim)),
        ]

    def dense(self, width: int, *, hf: str, local: str) -> list[LocalParam]:
        return self.swiglu(hf, local, SwiGLUNames(), share=self.of_tp(width), expert=False)

    def sparse(self, spec: Sparse, *, hf: str, local: str) -> list[LocalParam]:
        names, experts, hidden = self.config.family_spec.names, spec.num_experts, self.hidden
        share = self.of_etp(spec.width)
        rows = [whole(f"{local}.router", f"{hf}.{names.router}", (experts, hidden))]
        if spec.router.correction:
            rows.append(self.correction(spec, hf=hf, local=local))
        for expert in self.experts(experts):
            hf_expert, name = f"{hf}.{names.experts}.{expert}", f"{local}.experts.{expert}"
            matrices = self.swiglu(hf_expert, name, names.expert, share=share, expert=True)
            rows += [replace(matrix, expert_index=expert) for matrix in matrices]
        if spec.shared:
            rows += self.dense(spec.shared.width, hf=f"{hf}.{names.shared}", local=f"{local}.shared")
            if spec.shared.gated:
                rows.append(whole(f"{local}.shared_gate", f"{hf}.{names.shared_gate}", (1, hidden)))
        return rows

    def correction(self, spec: Sparse, *, hf: str, local: str) -> LocalParam:
        name = self.config.family_spec.names.correction
        row = whole(f"{local}.correction", f"{hf}.{name}", (spec.num_experts,))
        return replace(row, storage="card", float32=True)

    def swiglu(self, hf: str, local: str, names: SwiGLUNames, *, share: Span, expert: bool) -> list[LocalParam]:
        gate_up = [(f"{hf}.{names.gate}", share), (f"{hf}.{names.up}", share)]
        return [
            stacked(f"{local}.gate_up", gate_up, self.hidden, expert=expert),
            columns(f"{local}.down", f"{hf}.{names.down}", self.hidden, share, expert=expert),
        ]
