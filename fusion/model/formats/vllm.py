"""Describe vLLM's models as a parameter table: their names, shapes and order, as `LocalParam`s. Pure.

Local tensors of a rank (l: its share under TP), with the layers' own numbers; of sparse layers `mlp` or what the
checkpoint calls it, as in `block_sparse_moe`:

    model.embed_tokens.weight                       [Vl, D]              rows padded to 64, then cut
    model.layers.i.input_layernorm.weight           [D]
    model.layers.i.self_attn.qkv_proj.weight        [(Hl + 2 Kl) C, D]   q, k and v rows, concatenated; .bias alike
    model.layers.i.self_attn.q_norm.weight          [C] or [H C]         never cut; k_norm alike
    model.layers.i.self_attn.o_proj.weight          [D, Hl C]            .bias [D]
    model.layers.i.post_attention_layernorm.weight  [D]
    model.layers.i.mlp.gate_up_proj.weight          [2 Fl, D]            gate rows over up rows
    model.layers.i.mlp.down_proj.weight             [D, Fl]
    model.layers.i.mlp.gate.weight                  [E, D]               e_score_correction_bias [E], float32
    model.layers.i.mlp.experts.routed_experts.
        w13_weight                                  [El, 2 Fl, D]        of each expert gate rows over up rows
        w2_weight                                   [El, D, Fl]
    model.layers.i.mlp.shared_experts.gate_up_proj, down_proj            as of a dense MLP; shared_expert_gate [1, D]
    model.norm.weight                               [D]
    lm_head.weight                                  [Vl, D]              as embed_tokens; absent where they are tied

Latent attention, whose low-rank projections are fused where vLLM attends to latents (not on the CPU):

    model.layers.i.self_attn.fused_qkv_a_proj       [Q + R + P, D]       else q_a_proj [Q, D], kv_a_proj_with_mqa
    model.layers.i.self_attn.q_a_layernorm, q_b_proj [Hl C, Q]           or q_proj [Hl C, D]
    model.layers.i.self_attn.kv_a_layernorm, kv_b_proj [Hl (C - P + V), R]

vllm-ascend stores w13 as [El, D, 2 Fl] and w2 as [El, Fl, D]: the same parts, transposed.

Invariants: over the ranks of a layout the parts cover every element of every global tensor; an element of a local
tensor belongs to at most one part; to none exactly if it is a padding row of the vocabulary. vLLM distributes the
experts of a layer over all ranks of a stage: whole (ep) or each cut into shares (etp), in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusion.model.config import ModelConfig
from fusion.model.local_param import LocalParam, Part
from fusion.model.parallel import Parallel
from fusion.model.shares import RankShares, Span, columns, stacked
from fusion.model.shares import whole as whole_of
from fusion.model.spec import Dense, GroupedQuery, Latent, Sparse, SwiGLUNames
from fusion.model.table import EMBEDDING, kv_heads

FAMILIES = ("qwen3", "qwen3_moe", "llama", "qwen2", "mixtral", "olmoe", "deepseek_v3")
"""Families of which vLLM's tensors are known and its output has been compared"""

VOCABULARY_ROWS = 64
"""Rows to a multiple of which the vocabulary is padded"""

OLMOE_EPS = 1e-5
"""Epsilon of all norms of vLLM's OLMoE, whatever the config says"""


@dataclass(frozen=True)
class Variant:
    """What depends on the device that vLLM runs on.

    Attributes:
        transposed_experts: w13 is [El, D, 2 Fl] and w2 is [El, Fl, D].
        fused_latents: the low-rank projections of latent attention are one tensor.
    """

    transposed_experts: bool = False
    fused_latents: bool = True


CUDA, CPU, ASCEND = Variant(), Variant(fused_latents=False), Variant(transposed_experts=True)


def local_params(config: ModelConfig, parallel: Parallel, rank: int, variant: Variant = CUDA) -> tuple[LocalParam, ...]:
    """Return the parameters of vLLM's model on ``rank`` of one engine, in the order of the forward pass.

    Raises:
        ValueError: vLLM does not divide the model so (`misfit`), or `check_supported`.
    """
    check_supported(config)
    if problem := misfit(config, parallel):
        raise ValueError(problem)
    return tuple(_Table(config, parallel, rank, variant).params())


def misfit(config: ModelConfig, parallel: Parallel) -> str | None:
    """Return the axis of an engine's layout that vLLM cannot form or that does not divide the model, or None."""
    tp, ep, etp, ranks = parallel.tp, parallel.ep, parallel.etp, parallel.stage_world
    if parallel.pp > 1:
        return f"pp={parallel.pp}: the vLLM backend has no pipeline stages; set it to 1"
    if config.num_experts and (ep, etp) not in ((ranks, 1), (1, ranks)):
        return (
            f"ep={ep} with etp={etp}: vLLM distributes experts over all {ranks} ranks of an engine; set ep={ranks} and "
            f"etp=1, or ep=1 and etp={ranks}"
        )
    padded = _padded(config.vocab_size)
    if padded % tp:
        return f"tp={tp} does not divide the {padded} rows of the padded vocabulary, as vLLM requires"
    if config.family == "olmoe" and tp > config.num_kv_heads:
        return f"tp={tp} exceeds num_key_value_heads={config.num_kv_heads}, which vLLM's OLMoE does not compute"
    return parallel.misfit(config)


def check_supported(config: ModelConfig) -> None:
    """Check that vLLM's tensors of this model are described, and that it computes the same.

    Raises:
        ValueError: another family, a reward model, or a field (named) that vLLM's model of the family does not read.
    """
    if config.family not in FAMILIES or config.num_labels:
        what = "reward model of" if config.num_labels else "family"
        raise ValueError(
            f"the vLLM backend does not describe the {what} {config.family}; expected a language model of one of "
            f"{', '.join(FAMILIES)}"
        )
    if config.family == "olmoe" and (config.rms_norm_eps != OLMOE_EPS or config.experts.router.normalise):
        raise ValueError(
            f"vLLM's OLMoE computes with rms_norm_eps={OLMOE_EPS} and norm_topk_prob=false only, and the model has "
            f"rms_norm_eps={config.rms_norm_eps} and norm_topk_prob={str(config.experts.router.normalise).lower()}"
        )


def _padded(vocab_size: int) -> int:
    return vocab_size + -vocab_size % VOCABULARY_ROWS


class _Table(RankShares):
    def __init__(self, config: ModelConfig, parallel: Parallel, rank: int, variant: Variant):
        super().__init__(parallel, rank)
        self.config, self.variant = config, variant

    def params(self) -> Iterator[LocalParam]:
        config = self.config
        yield self.vocabulary("model.embed_tokens.weight", EMBEDDING)
        for index in range(config.num_layers):
            for param in self.layer(index, f"model.layers.{index}"):
                yield replace(param, layer=index)
        yield _whole("model.norm.weight", (config.hidden_size,))
        if not config.tie_embeddings:
            yield self.vocabulary("lm_head.weight", "lm_head.weight")

    def vocabulary(self, name: str, hf: str) -> LocalParam:
        """Describe this rank's rows of the padded vocabulary; those past its end have no part."""
        size, width = self.config.vocab_size, self.config.hidden_size
        first, last = self.of_tp(_padded(size))
        held = stacked(name, [(hf, (first, min(size, last)))] if first < size else [], width)
        return replace(held, shape=(last - first, width))

    def columns(self, name: str, share: Span) -> LocalParam:
        return columns(name, name, self.config.hidden_size, share)

    def layer(self, index: int, path: str) -> Iterator[LocalParam]:
        spec, hidden = self.config.layer(index), self.config.hidden_size
        yield _whole(f"{path}.input_layernorm.weight", (hidden,))
        match spec.attention:
            case GroupedQuery():
                yield from self.grouped_query(spec.attention, f"{path}.self_attn")
            case Latent():
                yield from self.latent(spec.attention, f"{path}.self_attn")
        yield _whole(f"{path}.post_attention_layernorm.weight", (hidden,))
        match spec.mlp:
            case Dense():
                yield from self.dense(spec.mlp.width, f"{path}.mlp")
            case Sparse():
                yield from self.sparse(spec.mlp, path)

    def grouped_query(self, spec: GroupedQuery, path: str) -> Iterator[LocalParam]:
        c, hidden = spec.head_dim, self.config.hidden_size
        q_rows, (first, end) = self.of_tp(spec.num_heads * c), kv_heads(self.config, self.parallel, self.tp_rank)
        shares = {"q": q_rows, "k": (first * c, end * c), "v": (first * c, end * c)}
        weights = [(f"{path}.{x}_proj.weight", rows) for x, rows in shares.items()]
        yield stacked(f"{path}.qkv_proj.weight", weights, hidden)
        if spec.qkv_bias:
            yield stacked(f"{path}.qkv_proj.bias", [(f"{path}.{x}_proj.bias", rows) for x, rows in shares.items()])
        if spec.qk_norm != "none":
            whole = spec.qk_norm == "projection"
            for x, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
                yield _whole(f"{path}.{x}_norm.weight", (heads * c if whole else c,))
        yield self.columns(f"{path}.o_proj.weight", q_rows)
        if spec.out_bias:
            yield _whole(f"{path}.o_proj.bias", (hidden,))

    def latent(self, spec: Latent, path: str) -> Iterator[LocalParam]:
        hidden, heads = self.config.hidden_size, spec.num_heads
        q_rows, kv_a = self.of_tp(heads * spec.head_dim), (f"{path}.kv_a_proj_with_mqa.weight", (0, spec.cached_width))
        fused = self.variant.fused_latents and spec.q_rank is not None
        if spec.q_rank is None:
            yield stacked(f"{path}.q_proj.weight", [(f"{path}.q_proj.weight", q_rows)], hidden)
        else:
            q_a = f"{path}.q_a_proj.weight", (0, spec.q_rank)
            name, pieces = (f"{path}.fused_qkv_a_proj.weight", [q_a, kv_a]) if fused else (q_a[0], [q_a])
            yield stacked(name, pieces, hidden, tp_sharded=False)
            yield _whole(f"{path}.q_a_layernorm.weight", (spec.q_rank,))
            q_b = f"{path}.q_b_proj.weight"
            yield stacked(q_b, [(q_b, q_rows)], spec.q_rank)
        if not fused:
            yield stacked(kv_a[0], [kv_a], hidden, tp_sharded=False)
        yield _whole(f"{path}.kv_a_layernorm.weight", (spec.kv_rank,))
        kv_b, kv_rows = f"{path}.kv_b_proj.weight", self.of_tp(heads * (spec.nope_dim + spec.value_dim))
        yield stacked(kv_b, [(kv_b, kv_rows)], spec.kv_rank)
        yield self.columns(f"{path}.o_proj.weight", self.of_tp(heads * spec.value_dim))

    def dense(self, width: int, path: str) -> Iterator[LocalParam]:
        hidden, share, names = self.config.hidden_size, self.of_tp(width), SwiGLUNames()
        halves = [(f"{path}.{half}", share) for half in (names.gate, names.up)]
        yield stacked(f"{path}.gate_up_proj.weight", halves, hidden)
        yield self.columns(f"{path}.{names.down}", share)

    def sparse(self, spec: Sparse, path: str) -> Iterator[LocalParam]:
        names, hidden = self.config.family_spec.names, self.config.hidden_size
        yield _whole(f"{path}.{names.router}", (spec.num_experts, hidden))
        if spec.router.correction:
            correction = _whole(f"{path}.{names.correction}", (spec.num_experts,))
            yield replace(correction, storage="card", float32=True)
        yield from self.stacks(spec, f"{path}.{names.experts}", names.expert)
        if spec.shared:
            yield from self.dense(spec.shared.width, f"{path}.{names.shared}")
            if spec.shared.gated:
                yield _whole(f"{path}.{names.shared_gate}", (1, hidden))

    def stacks(self, spec: Sparse, path: str, names: SwiGLUNames) -> Iterator[LocalParam]:
        """Describe the stacks of this rank's experts, or of its shares of all experts."""
        hidden, own, share = self.config.hidden_size, self.experts(spec.num_experts), self.of_etp(spec.width)
        width, transposed = share[1] - share[0], self.variant.transposed_experts
        w13: list[Part] = []
        w2: list[Part] = []
        for slot, expert in enumerate(own):
            hf = f"{path}.{expert}"
            for half, name in enumerate((names.gate, names.up)):
                place = (half * width, (half + 1) * width), (0, hidden)
                w13.append(_matrix_of_stack(f"{hf}.{name}", (share, (0, hidden)), slot, place, transposed))
            place = (0, hidden), (0, width)
            w2.append(_matrix_of_stack(f"{hf}.{names.down}", ((0, hidden), share), slot, place, transposed))
        for name, rows, inner, parts in (("w13", 2 * width, hidden, w13), ("w2", hidden, width, w2)):
            shape = (len(own), inner, rows) if transposed else (len(own), rows, inner)
            yield LocalParam(f"{path}.routed_experts.{name}_weight", shape, tuple(parts), expert=True)


def _whole(name: str, shape: tuple[int, ...]) -> LocalParam:
    return whole_of(name, name, shape)


def _matrix_of_stack(
    hf: str, region: tuple[tuple[int, int], ...], slot: int, place: tuple[tuple[int, int], ...], transposed: bool
) -> Part:
    """Place a box of a matrix in a stack: ``place`` in its own orientation."""
    return Part(hf, region, ((slot, slot + 1), *(place[::-1] if transposed else place)), transposed)
