"""Describe Megatron-Core's GPTModel as a parameter table: its names, shapes and order, as `LocalParam`s.

A plan compares only boxes of the global (Hugging Face) tensors, so another engine's format is another list of parts.
Local tensors of a rank (l: its share), with layers and experts numbered from zero on each rank:

    embedding.word_embeddings.weight                    [Vl, D]
    decoder.layers.i.input_layernorm.weight             [D]
    decoder.layers.i.self_attention.linear_qkv.weight   [Hl + 2 Kl heads of C, D]   the q, k and v rows of a KV group,
                                                        then those of the next; cut evenly, also inside a group
    decoder.layers.i.self_attention.linear_proj.weight  [D, Hl C]
    decoder.layers.i.self_attention.q_layernorm.weight  [C]                         (k_layernorm alike)
    decoder.layers.i.pre_mlp_layernorm.weight           [D]
    decoder.layers.i.mlp.linear_fc1.weight              [2 Fl, D]                   gate rows over up rows
    decoder.layers.i.mlp.linear_fc2.weight              [D, Fl]
    decoder.layers.i.mlp.router.weight                  [E, D]
    decoder.layers.i.mlp.experts.local_experts.e.linear_fc1.weight, linear_fc2      as mlp, cut by expert-TP
    decoder.final_layernorm.weight                      [D]                         last stage
    output_layer.weight                                 [Vl, D]                     last stage

Invariants: over the ranks of a layout the parts cover every element of every global tensor; every element of a local
tensor belongs to exactly one part. Megatron-Core divides layers evenly over stages and knows no other placement of
experts than the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusion.model.config import ModelConfig
from fusion.model.parallel import Parallel
from fusion.model.table import EMBEDDING, LocalParam, Part

Rows = tuple[str, int, int]
"""Rows [start, stop) of a global tensor."""


def local_params(config: ModelConfig, parallel: Parallel, rank: int) -> tuple[LocalParam, ...]:
    """Return the parameters that `GPTModel.named_parameters` has on ``rank``, in the order of the forward pass.

    Only the tensor-parallel cut of `linear_qkv` may differ from the embedded trainer's: if TP exceeds the number of KV
    groups, each rank holds an even share of the fused rows and gathers them to compute.

    Raises:
        ValueError: Megatron does not divide the model so (`misfit`), or `check_supported`.
    """
    check_supported(config)
    if problem := misfit(config, parallel):
        raise ValueError(problem)
    return tuple(_Table(config, parallel, rank).params())


def misfit(config: ModelConfig, parallel: Parallel) -> str | None:
    """Return the axis of a layout that does not divide the model as Megatron requires, with both numbers, or None."""
    if config.num_layers % parallel.pp:
        return f"pp={parallel.pp} does not divide num_hidden_layers={config.num_layers}, as Megatron requires"
    fused_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    if fused_rows % parallel.tp:
        return f"tp={parallel.tp} does not divide the {fused_rows} rows of linear_qkv, as Megatron requires"
    return None


def check_supported(config: ModelConfig) -> None:
    """Check that the backend describes this model: Qwen3 or Qwen3-MoE with equal layers.

    Raises:
        ValueError: another family, layers of two kinds, biases, or a scaled rotary embedding.
    """
    plain = config.attention.rotary.kind == "default" and all(layer == config.layers[0] for layer in config.layers)
    if config.family not in ("qwen3", "qwen3_moe") or not plain or config.grouped_query.qkv_bias:
        raise ValueError(
            f"the Megatron backend does not describe this {config.family} model; expected qwen3 or qwen3_moe with "
            "layers of one kind, without biases and without scaled rotary embeddings"
        )


class _Table:
    def __init__(self, config: ModelConfig, parallel: Parallel, rank: int):
        self.config, self.parallel = config, parallel
        self.tp = parallel.coordinate("tp", rank), parallel.tp
        self.etp = parallel.coordinate("etp", rank), parallel.etp
        self.ep_rank, self.stage = parallel.coordinate("ep", rank), parallel.coordinate("pp", rank)

    def params(self) -> Iterator[LocalParam]:
        config, last = self.config, self.stage == self.parallel.pp - 1
        vocabulary = [(EMBEDDING, 0, config.vocab_size)]
        if self.stage == 0:
            yield self.rows("embedding.word_embeddings", vocabulary, self.tp)
        for index, layer in enumerate(self.parallel.layers(config.num_layers, self.stage)):
            for param in self.layer(f"decoder.layers.{index}", f"model.layers.{layer}"):
                yield replace(param, layer=layer)
        if last:
            yield self.whole("decoder.final_layernorm", "model.norm", (config.hidden_size,))
        if last and not config.tie_embeddings:
            yield self.rows("output_layer", [("lm_head.weight", 0, config.vocab_size)], self.tp)
        elif last and self.stage:
            yield self.rows("output_layer", vocabulary, self.tp)

    def layer(self, name: str, hf: str) -> Iterator[LocalParam]:
        config = self.config
        c, d = config.head_dim, config.hidden_size
        yield self.whole(f"{name}.input_layernorm", f"{hf}.input_layernorm", (d,))
        yield self.rows(f"{name}.self_attention.linear_qkv", list(self.fused_qkv(f"{hf}.self_attn")), self.tp)
        o_proj = f"{hf}.self_attn.o_proj.weight"
        yield self.columns(f"{name}.self_attention.linear_proj", o_proj, width=config.num_heads * c, cut=self.tp)
        for norm in ("q", "k"):
            yield self.whole(f"{name}.self_attention.{norm}_layernorm", f"{hf}.self_attn.{norm}_norm", (c,))
        yield self.whole(f"{name}.pre_mlp_layernorm", f"{hf}.post_attention_layernorm", (d,))
        if not config.num_experts:
            width = config.intermediate_size
            yield from self.mlp(f"{name}.mlp", f"{hf}.mlp", width=width, cut=self.tp, expert=False)
            return
        yield self.whole(f"{name}.mlp.router", f"{hf}.mlp.gate", (config.num_experts, d))
        num_local_experts = config.num_experts // self.parallel.ep
        for slot in range(num_local_experts):
            expert = self.ep_rank * num_local_experts + slot
            hf_expert, local = f"{hf}.mlp.experts.{expert}", f"{name}.mlp.experts.local_experts.{slot}"
            for param in self.mlp(local, hf_expert, width=config.moe_intermediate_size, cut=self.etp, expert=True):
                yield replace(param, expert_index=expert)

    def mlp(self, name: str, hf: str, width: int, cut: tuple[int, int], expert: bool) -> Iterator[LocalParam]:
        gate_up = [(f"{hf}.{half}_proj.weight", *_share(0, width, cut)) for half in ("gate", "up")]
        yield self.rows(f"{name}.linear_fc1", gate_up, cut=(0, 1), expert=expert)
        yield self.columns(f"{name}.linear_fc2", f"{hf}.down_proj.weight", width=width, cut=cut, expert=expert)

    def fused_qkv(self, hf: str) -> Iterator[Rows]:
        """Yield all rows of the fused projection, KV group by KV group."""
        config = self.config
        c, queries = config.head_dim, config.num_heads // config.num_kv_heads
        for group in range(config.num_kv_heads):
            yield f"{hf}.q_proj.weight", group * queries * c, (group + 1) * queries * c
            yield f"{hf}.k_proj.weight", group * c, (group + 1) * c
            yield f"{hf}.v_proj.weight", group * c, (group + 1) * c

    def whole(self, name: str, hf: str, shape: tuple[int, ...]) -> LocalParam:
        box = tuple((0, size) for size in shape)
        return LocalParam(f"{name}.weight", shape, (Part(f"{hf}.weight", box, box),))

    def rows(self, name: str, stack: list[Rows], cut: tuple[int, int], expert: bool = False) -> LocalParam:
        """Describe this rank's share of the stacked rows."""
        width, parts, offset = self.config.hidden_size, [], 0
        first, last = _share(0, sum(stop - start for _, start, stop in stack), cut)
        for hf_name, start, stop in stack:
            begin, end = max(offset, first), min(offset + stop - start, last)
            if begin < end:
                region = ((start + begin - offset, start + end - offset), (0, width))
                parts.append(Part(hf_name, region, ((begin - first, end - first), (0, width))))
            offset += stop - start
        return LocalParam(f"{name}.weight", (last - first, width), tuple(parts), expert=expert, tp_sharded=not expert)

    def columns(self, name: str, hf_name: str, width: int, cut: tuple[int, int], expert: bool = False) -> LocalParam:
        height, (start, stop) = self.config.hidden_size, _share(0, width, cut)
        part = Part(hf_name, ((0, height), (start, stop)), ((0, height), (0, stop - start)))
        return LocalParam(f"{name}.weight", (height, stop - start), (part,), expert=expert, tp_sharded=not expert)


def _share(start: int, stop: int, cut: tuple[int, int]) -> tuple[int, int]:
    index, count = cut
    size = (stop - start) // count
    return start + index * size, start + (index + 1) * size
