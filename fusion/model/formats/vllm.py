"""Describe vLLM's models as a parameter table: their names, shapes and order, as `LocalParam`s. Pure.

The local tensors are those of `fusion.model.table`, uncut, under vLLM's names (`_VLLMTable.names`); of sparse layers
those of the checkpoint. They differ (l: a rank's share under TP) in

    model.embed_tokens.weight, lm_head.weight       [Vl, D]              rows padded to 64, then cut
    self_attn.q_norm.weight                         [C] or [H C]         never cut; k_norm alike
    self_attn.fused_qkv_a_proj.weight               [Q + R + P, D]       where vLLM attends to latents (not on the CPU),
                                                                         for q_a_proj and kv_a_proj_with_mqa
    mlp.experts.routed_experts.w13_weight           [El, 2 Fl, D]        of each expert gate rows over up rows
    mlp.experts.routed_experts.w2_weight            [El, D, Fl]

vllm-ascend stores w13 as [El, D, 2 Fl] and w2 as [El, Fl, D]: the same parts, transposed.

Invariants: over the ranks of a layout the parts cover every element of every global tensor; an element of a local
tensor belongs to at most one part; to none exactly if it is a padding row of the vocabulary. vLLM distributes the
experts of a layer over all ranks of a stage: whole (ep) or each cut into shares (etp), in the order of their numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusion.model.config import ModelConfig
from fusion.model.local_param import LocalParam, Part
from fusion.model.parallel import Parallel
from fusion.model.shares import cut, stacked
from fusion.model.spec import Latent, Sparse
from fusion.model.table import LocalNames, Table

FAMILIES = ("qwen3", "qwen3_moe", "llama", "qwen2", "mixtral", "olmoe", "qwen2_moe", "deepseek_v2", "deepseek_v3")
"""Families of which vLLM's tensors are known and its output has been compared"""

VOCABULARY_ROWS = 64
"""Rows to a multiple of which the vocabulary is padded"""

OLMOE_EPS = 1e-5
"""Epsilon of all norms of vLLM's OLMoE, whatever the config says"""


@dataclass(frozen=True)
class Variant:
    """What depends on the device that vLLM runs on. ``transposed_experts``: w13 is [El, D, 2 Fl] and w2 is [El, Fl, D].
    ``fused_latents``: the low-rank projections of latent attention are one tensor."""

    transposed_experts: bool = False
    fused_latents: bool = True


CUDA, CPU, ASCEND = Variant(), Variant(fused_latents=False), Variant(transposed_experts=True)


def local_params(config: ModelConfig, parallel: Parallel, rank: int, variant: Variant = CUDA) -> tuple[LocalParam, ...]:
    """Return the parameters of vLLM's model on ``rank`` of one engine, in the order of the forward pass.
    Raise ValueError: vLLM does not divide the model so (`misfit`), or `check_supported`."""
    check_supported(config)
    if problem := misfit(config, parallel):
        raise ValueError(problem)
    return tuple(_VLLMTable(config, parallel, rank, variant).params())


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
    Raise ValueError: another family, a reward model, or a field (named) that vLLM's model of the family does not read.
    """
    if config.family not in FAMILIES or config.num_labels:
        what = "reward model of" if config.num_labels else "family"
        raise ValueError(
            f"the vLLM backend does not describe the {what} {config.family}; expected a language model of one of "
            f"{', '.join(FAMILIES)}"
        )
    if isinstance(config.attention, Latent) and not config.attention.rotary.interleaved:
        raise ValueError(
            f"vLLM's model of {config.family} rotates channels 2i and 2i + 1 together: rope_interleave=false"
        )
    if config.family == "olmoe" and (config.rms_norm_eps != OLMOE_EPS or config.experts.router.normalise):
        raise ValueError(
            f"vLLM's OLMoE computes with rms_norm_eps={OLMOE_EPS} and norm_topk_prob=false only, and the model has "
            f"rms_norm_eps={config.rms_norm_eps} and norm_topk_prob={str(config.experts.router.normalise).lower()}"
        )


def _padded(vocab_size: int) -> int:
    return vocab_size + -vocab_size % VOCABULARY_ROWS


class _VLLMTable(Table):
    cuts_qk_norm = False

    def __init__(self, config: ModelConfig, parallel: Parallel, rank: int, variant: Variant):
        super().__init__(config, parallel, rank)
        hf, self.variant = self.hf_names, variant
        self.names = LocalNames(
            embed="model.embed_tokens.weight",
            head="lm_head.weight",
            norm="model.norm.weight",
            input_norm="input_layernorm.weight",
            post_norm="post_attention_layernorm.weight",
            qkv="self_attn.qkv_proj.weight",
            qkv_bias="self_attn.qkv_proj.bias",
            q_norm="self_attn.q_norm.weight",
            k_norm="self_attn.k_norm.weight",
            out="self_attn.o_proj.weight",
            out_bias="self_attn.o_proj.bias",
            q="self_attn.q_proj.weight",
            q_a="self_attn.q_a_proj.weight",
            q_a_norm="self_attn.q_a_layernorm.weight",
            q_b="self_attn.q_b_proj.weight",
            kv_a="self_attn.kv_a_proj_with_mqa.weight",
            kv_a_norm="self_attn.kv_a_layernorm.weight",
            kv_b="self_attn.kv_b_proj.weight",
            gate_up="gate_up_proj.weight",
            down="down_proj.weight",
            router=hf.router,
            correction=hf.correction,
            shared=hf.shared,
            shared_gate=hf.shared_gate,
        )

    def path(self, index: int) -> str:
        return f"model.layers.{index}"

    def vocabulary(self, name: str, hf_name: str) -> LocalParam:
        """Describe this rank's rows of the padded vocabulary; those past its end have no part."""
        size, (first, last) = self.config.vocab_size, self.of_tp(_padded(self.config.vocab_size))
        held = stacked(name, [(hf_name, (first, min(size, last)))] if first < size else [], self.hidden)
        return replace(held, shape=(last - first, self.hidden))

    def latent(self, spec: Latent, hf: str, local: str) -> Iterator[LocalParam]:
        params = list(super().latent(spec, hf, local))
        if self.variant.fused_latents and spec.q_rank is not None:
            rows = [(f"{hf}.q_a_proj.weight", spec.q_rank), (f"{hf}.kv_a_proj_with_mqa.weight", spec.cached_width)]
            pieces = [(name, (0, num_rows)) for name, num_rows in rows]
            fused = stacked(f"{local}.self_attn.fused_qkv_a_proj.weight", pieces, self.hidden, tp_sharded=False)
            params = [fused, *(param for param in params[1:] if param.name != f"{local}.{self.names.kv_a}")]
        yield from params

    def experts(self, spec: Sparse, own: range, hf: str, local: str) -> Iterator[LocalParam]:
        """Yield the stacks of this rank's experts, or of its shares of all experts."""
        hidden, names, share = self.hidden, self.hf_names.expert, cut(spec.width, self.etp_rank, self.parallel.etp)
        width, transposed = share[1] - share[0], self.variant.transposed_experts
        w13: list[Part] = []
        w2: list[Part] = []
        for slot, expert in enumerate(own):
            path = f"{hf}.{self.hf_names.experts}.{expert}"
            for half, name in enumerate((names.gate, names.up)):
                place = (half * width, (half + 1) * width), (0, hidden)
                w13.append(_matrix_of_stack(f"{path}.{name}", (share, (0, hidden)), slot, place, transposed))
            place = (0, hidden), (0, width)
            w2.append(_matrix_of_stack(f"{path}.{names.down}", ((0, hidden), share), slot, place, transposed))
        for name, rows, inner, parts in (("w13", 2 * width, hidden, w13), ("w2", hidden, width, w2)):
            shape = (len(own), inner, rows) if transposed else (len(own), rows, inner)
            local_name = f"{local}.{self.hf_names.experts}.routed_experts.{name}_weight"
            yield LocalParam(local_name, shape, tuple(parts), expert=True)


def _matrix_of_stack(
    hf: str, region: tuple[tuple[int, int], ...], slot: int, place: tuple[tuple[int, int], ...], transposed: bool
) -> Part:
    """Place a box of a matrix in a stack: ``place`` in its own orientation."""
    return Part(hf, region, ((slot, slot + 1), *(place[::-1] if transposed else place)), transposed)
