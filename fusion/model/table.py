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

Another program's model is described by other names (`LocalNames`), and by a `Table` that overrides what it stores
otherwise (`formats`).

A matrix that is too large for a storage unit is cut along its rows into separate local tensors `name.0`, `name.1`, …,
whose outputs are concatenated. `kv_b` is cut only between heads. `LocalParam.storage` says where a local tensor lies:
most are trained and lie in the units that a switch moves.

Invariant: over the ranks of one grid the parts cover every element of every global tensor, and every element of a local
tensor belongs to exactly one part."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusion.model.adapters import with_adapters
from fusion.model.config import ModelConfig
from fusion.model.local_param import LocalParam
from fusion.model.parallel import Parallel
from fusion.model.shares import Span, columns, cut, stacked, whole
from fusion.model.spec import Dense, GroupedQuery, Latent, LayerSpec, Sparse, SwiGLUNames

EMBEDDING = "model.embed_tokens.weight"
"""The global tensor that the first stage and, where embeddings are tied, also the last stage holds."""
HEAD = "lm_head.weight"
"""The global tensor of the head; none where embeddings are tied."""
SWIGLU = SwiGLUNames()


@dataclass(frozen=True)
class LocalNames:
    """Names of local tensors, below the path of their layer where they belong to one. ``gate_up`` and ``down``: below
    their SwiGLU; ``expert``: of an expert by its number in the model (``expert``) or on its rank (``slot``); ``stack``:
    of the stacks of a rank's experts; ``correction_elsewhere``: of the correction bias of a layer of another stage."""

    embed: str = "embed"
    head: str = "lm_head"
    tied_head: str = "embed"
    norm: str = "norm"
    input_norm: str = "input_norm"
    attention_norm: str = "attention_norm"
    post_norm: str = "post_norm"
    mlp_norm: str = "mlp_norm"
    qkv: str = "attention.qkv"
    qkv_bias: str = "attention.qkv_bias"
    q_norm: str = "attention.q_norm"
    k_norm: str = "attention.k_norm"
    out: str = "attention.out"
    out_bias: str = "attention.out_bias"
    q: str = "attention.q"
    q_a: str = "attention.q_a"
    q_a_norm: str = "attention.q_a_norm"
    q_b: str = "attention.q_b"
    kv_a: str = "attention.kv_a"
    kv_a_norm: str = "attention.kv_a_norm"
    kv_b: str = "attention.kv_b"
    gate_up: str = "gate_up"
    down: str = "down"
    router: str = "moe.router"
    correction: str = "moe.correction"
    correction_elsewhere: str = "moe.correction"
    expert: str = "moe.experts.{expert}"
    stack: str = "moe.experts"
    shared: str = "moe.shared"
    shared_gate: str = "moe.shared_gate"


def kv_heads(config: ModelConfig, parallel: Parallel, tp_rank: int) -> Span:
    """Return the half-open range of key/value heads of a rank; ranks replicate heads where TP exceeds their number."""
    if parallel.tp <= config.num_kv_heads:
        return cut(config.num_kv_heads, tp_rank, parallel.tp)
    head = tp_rank * config.num_kv_heads // parallel.tp
    return head, head + 1


def global_params(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map the Hugging Face name of every tensor of a checkpoint to its shape."""
    parts = (part for param in local_params(config, Parallel(), 0) for part in param.parts)  # of a tensor in order
    return {part.name: tuple(stop for _, stop in part.region) for part in parts}


def float32_params(config: ModelConfig) -> frozenset[str]:
    """Return the names of the tensors of a checkpoint that are kept in float32."""
    table = local_params(config, Parallel(), 0)
    return frozenset(part.name for param in table if param.float32 for part in param.parts)


def local_params(
    config: ModelConfig, parallel: Parallel, rank: int, max_numel: int | None = None, *, stacks: bool = False
) -> tuple[LocalParam, ...]:
    """Return the local tensors of ``rank`` in the order of the forward pass, matrices cut to ``max_numel`` elements.
    ``stacks``: matrices of experts are stacked, and not cut."""
    table = (*Table(config, parallel, rank, stacks).params(), *predictor_params(config, parallel, rank))
    if config.adapters:
        table = with_adapters(table, config.adapters, parallel.etp)
    if max_numel is None:
        return table
    uncut = config.adapters is not None  # adapters are small, and their products are not written for blocks
    return tuple(block for param in table for block in ([param] if uncut and param.trained else param.cut(max_numel)))


def predictor_params(config: ModelConfig, parallel: Parallel, rank: int) -> list[LocalParam]:
    """Return what ``rank`` holds of the layers that predict further tokens, uncut. No program computes with them, so
    every format holds them alike."""
    table = Table(config, parallel, rank)
    layers = config.predictors if table.stage == parallel.pp - 1 else ()
    return [param for layer in layers for param in table.predictor(layer)]


class Table:
    """Describe the local tensors of ``rank`` in the embedded format."""

    names = LocalNames()
    cuts_qk_norm = True
    """Whether TP cuts the norm of a whole projection of queries or keys"""

    def __init__(self, config: ModelConfig, parallel: Parallel, rank: int, stacks: bool = False):
        self.config, self.parallel, self.hidden, self.stacks = config, parallel, config.hidden_size, stacks
        self.hf_names = config.family_spec.names
        self.tp_rank, self.ep_rank = parallel.coordinate("tp", rank), parallel.coordinate("ep", rank)
        self.etp_rank, self.stage = parallel.coordinate("etp", rank), parallel.coordinate("pp", rank)
        self.dp_rank, self.edp_rank = parallel.coordinate("dp", rank), parallel.coordinate("edp", rank)
        self.own_layers = parallel.layers(config.num_layers, self.stage)

    def of_tp(self, size: int) -> Span:
        return cut(size, self.tp_rank, self.parallel.tp)

    def path(self, index: int) -> str:
        """Return the path of a layer of this rank."""
        return f"layers.{index}"

    def params(self) -> Iterator[LocalParam]:
        """Yield the local tensors in the order of the forward pass, without the layers that predict further tokens."""
        config, names, first, last = self.config, self.names, self.stage == 0, self.stage == self.parallel.pp - 1
        if first:
            yield self.vocabulary(names.embed, EMBEDDING)
        for index, spec in enumerate(config.layers):
            if index in self.own_layers:
                yield from self.layer(index, self.path(index))
            else:
                hf, local = f"model.layers.{index}", f"layers.{index}.{names.correction_elsewhere}"
                yield from (replace(bias, layer=index) for bias in self.correction(spec, hf, local))
        if not last:
            return
        yield whole(names.norm, "model.norm.weight", (self.hidden,))
        if config.num_labels:
            yield whole("score", "score.weight", (config.num_labels, self.hidden))
        elif not config.tie_embeddings:
            yield self.vocabulary(names.head, HEAD)
        elif not first:
            yield self.vocabulary(names.tied_head, EMBEDDING)

    def vocabulary(self, name: str, hf_name: str) -> LocalParam:
        return stacked(name, [(hf_name, self.of_tp(self.config.vocab_size))], self.hidden)

    def layer(self, index: int, local: str) -> Iterator[LocalParam]:
        for param in self._layer(self.config.layer(index), f"model.layers.{index}", local):
            yield replace(param, layer=index)

    def _layer(self, spec: LayerSpec, hf: str, local: str) -> Iterator[LocalParam]:
        names, shape = self.names, (self.hidden,)
        yield whole(f"{local}.{names.input_norm}", f"{hf}.input_layernorm.weight", shape)
        match spec.attention:
            case GroupedQuery():
                yield from self.grouped_query(spec.attention, f"{hf}.self_attn", local)
            case Latent():
                yield from self.latent(spec.attention, f"{hf}.self_attn", local)
        if spec.sandwich:
            yield whole(f"{local}.{names.attention_norm}", f"{hf}.post_attention_layernorm.weight", shape)
        post_norm = "pre_mlp" if spec.sandwich else "post_attention"
        yield whole(f"{local}.{names.post_norm}", f"{hf}.{post_norm}_layernorm.weight", shape)
        match spec.mlp:
            case Dense():
                yield from self.swiglu(f"{hf}.mlp", f"{local}.mlp", self.of_tp(spec.mlp.width))
            case Sparse():
                yield from self.sparse(spec, spec.mlp, hf, local)
        if spec.sandwich:
            yield whole(f"{local}.{names.mlp_norm}", f"{hf}.post_mlp_layernorm.weight", shape)

    def predictor(self, index: int) -> list[LocalParam]:
        """Return the local tensors of a layer that predicts further tokens (DeepSeek-V3, arXiv 2412.19437, section
        2.2), of which only the first replica holds any."""
        hf, local, hidden, tp = f"model.layers.{index}", f"layers.{index}", self.hidden, self.parallel.tp
        even = self.tp_rank * hidden // tp, (self.tp_rank + 1) * hidden // tp  # as equal a share as TP allows
        rows = [
            self.vocabulary(f"{local}.embed", f"{hf}.embed_tokens.weight"),
            whole(f"{local}.enorm", f"{hf}.enorm.weight", (hidden,)),
            whole(f"{local}.hnorm", f"{hf}.hnorm.weight", (hidden,)),
            stacked(f"{local}.eh_proj", [(f"{hf}.eh_proj.weight", even)], 2 * hidden),
            *self.layer(index, local),
            whole(f"{local}.head_norm", f"{hf}.shared_head.norm.weight", (hidden,)),
            self.vocabulary(f"{local}.head", f"{hf}.shared_head.head.weight"),
        ]
        held = (row for row in rows if (self.edp_rank if row.expert else self.dp_rank) == 0)
        return [replace(row, storage="host", layer=index) for row in held]

    def grouped_query(self, spec: GroupedQuery, hf: str, local: str) -> Iterator[LocalParam]:
        names, c, (first, end) = self.names, spec.head_dim, kv_heads(self.config, self.parallel, self.tp_rank)
        q_rows, kv_rows = self.of_tp(spec.num_heads * c), (first * c, end * c)
        shares = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        yield stacked(
            f"{local}.{names.qkv}", [(f"{hf}.{x}_proj.weight", rows) for x, rows in shares.items()], self.hidden
        )
        if spec.qkv_bias:
            yield stacked(f"{local}.{names.qkv_bias}", [(f"{hf}.{x}_proj.bias", rows) for x, rows in shares.items()])
        for x, name, heads in (("q", names.q_norm, spec.num_heads), ("k", names.k_norm, spec.num_kv_heads)):
            if spec.qk_norm == "projection" and self.cuts_qk_norm:
                yield stacked(f"{local}.{name}", [(f"{hf}.{x}_norm.weight", shares[x])])
            elif spec.qk_norm != "none":
                yield whole(f"{local}.{name}", f"{hf}.{x}_norm.weight", (c if spec.qk_norm == "head" else heads * c,))
        yield from self.output(f"{hf}.o_proj", local, q_rows, spec.out_bias)

    def output(self, hf: str, local: str, share: Span, has_bias: bool = False) -> Iterator[LocalParam]:
        yield columns(f"{local}.{self.names.out}", f"{hf}.weight", self.hidden, share)
        if has_bias:
            yield whole(f"{local}.{self.names.out_bias}", f"{hf}.bias", (self.hidden,))

    def latent(self, spec: Latent, hf: str, local: str) -> Iterator[LocalParam]:
        names, heads = self.names, spec.num_heads
        q_rows, channels = self.of_tp(heads * spec.head_dim), spec.nope_dim + spec.value_dim
        if spec.q_rank is None:
            yield stacked(f"{local}.{names.q}", [(f"{hf}.q_proj.weight", q_rows)], self.hidden)
        else:
            yield self.down(f"{local}.{names.q_a}", f"{hf}.q_a_proj.weight", spec.q_rank)
            yield whole(f"{local}.{names.q_a_norm}", f"{hf}.q_a_layernorm.weight", (spec.q_rank,))
            yield stacked(f"{local}.{names.q_b}", [(f"{hf}.q_b_proj.weight", q_rows)], spec.q_rank)
        yield self.down(f"{local}.{names.kv_a}", f"{hf}.kv_a_proj_with_mqa.weight", spec.cached_width)
        yield whole(f"{local}.{names.kv_a_norm}", f"{hf}.kv_a_layernorm.weight", (spec.kv_rank,))
        kv_rows = [(f"{hf}.kv_b_proj.weight", self.of_tp(heads * channels))]
        yield replace(stacked(f"{local}.{names.kv_b}", kv_rows, spec.kv_rank), row_group=channels)
        yield from self.output(f"{hf}.o_proj", local, self.of_tp(heads * spec.value_dim))

    def down(self, name: str, hf_name: str, rank: int) -> LocalParam:
        """Return a projection of latent attention to ``rank`` channels."""
        return whole(name, hf_name, (rank, self.hidden))

    def sparse(self, layer: LayerSpec, spec: Sparse, hf: str, local: str) -> Iterator[LocalParam]:
        names, hf_names = self.names, self.hf_names
        yield whole(f"{local}.{names.router}", f"{hf}.{hf_names.router}", (spec.num_experts, self.hidden))
        yield from self.correction(layer, hf, f"{local}.{names.correction}")
        yield from self.experts(spec, range(*cut(spec.num_experts, self.ep_rank, self.parallel.ep)), hf, local)
        if spec.shared:
            share = self.of_tp(spec.shared.width)
            yield from self.swiglu(f"{hf}.{hf_names.shared}", f"{local}.{names.shared}", share)
            if spec.shared.gated:
                yield whole(f"{local}.{names.shared_gate}", f"{hf}.{hf_names.shared_gate}", (1, self.hidden))

    def experts(self, spec: Sparse, own: range, hf: str, local: str) -> Iterator[LocalParam]:
        """Yield the matrices of this rank's ``own`` experts, or of its shares of them."""
        share = cut(spec.width, self.etp_rank, self.parallel.etp)
        for slot, expert in enumerate(own):
            name, hf_name = self.names.expert.format(expert=expert, slot=slot), f"{hf}.{self.hf_names.experts}.{expert}"
            for matrix in self.swiglu(hf_name, f"{local}.{name}", share, self.hf_names.expert, expert=True):
                stack = matrix.name.replace(f"{name}.", f"{self.names.stack}.") if self.stacks else None
                yield replace(matrix, expert_index=expert, stack=stack)

    def correction(self, layer: LayerSpec, hf: str, name: str) -> Iterator[LocalParam]:
        """Yield the correction bias of a layer's router, which every rank holds, if it has one."""
        if isinstance(layer.mlp, Sparse) and layer.mlp.router.correction:
            bias = whole(name, f"{hf}.{self.hf_names.correction}", (layer.mlp.num_experts,))
            yield replace(bias, storage="card", float32=True)

    def swiglu(
        self, hf: str, local: str, share: Span, names: SwiGLUNames = SWIGLU, *, expert: bool = False
    ) -> Iterator[LocalParam]:
        gate_up = [(f"{hf}.{names.gate}", share), (f"{hf}.{names.up}", share)]
        yield stacked(f"{local}.{self.names.gate_up}", gate_up, self.hidden, expert=expert)
        yield columns(f"{local}.{self.names.down}", f"{hf}.{names.down}", self.hidden, share, expert=expert)
