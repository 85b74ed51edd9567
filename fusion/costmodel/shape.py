"""Describes a model for planning: the tensors of each layer, and the dimension along which each may be sharded.

A model that can be trained has a `ModelConfig` and a parameter table (`fusion.model.local_params`). This smaller
description also covers models that cannot be trained yet: latent attention (MLA), leading dense layers, shared experts.
It is read from the fields of a Hugging Face `config.json`. Invariant: for a model that has both, `boxes` are the boxes
of `local_params`, name for name and element for element, on every rank of every layout.

    cut      part on each rank
    whole    the whole tensor (norms, router, the low-rank projections of MLA, as in Megatron-Core and vLLM)
    tp       1/tp of a dimension
    kv       key/value heads; ranks share one where tp exceeds their number
    expert   the experts of the EP rank, of each 1/etp of a dimension
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

from fusion.model import ModelConfig, Parallel
from fusion.model.local_param import Box

Cut = Literal["whole", "tp", "kv", "expert"]
MLA = ("deepseek_v3", "pangu_ultra_moe")
GROUPED = ("qwen3", "qwen3_moe")
"""Families with grouped-query attention that can be planned for"""
PANGU_NAMES = {
    "attention_q_lora_dim": "q_lora_rank",
    "attention_kv_lora_dim": "kv_lora_rank",
    "attention_qk_dim": "qk_nope_head_dim",
    "attention_qk_rope_dim": "qk_rope_head_dim",
    "attention_v_dim": "v_head_dim",
    "num_routed_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_dense_layers": "first_k_dense_replace",
}
"""openPangu's name of a field → DeepSeek's name."""


@dataclass(frozen=True)
class Tensor:
    """A global tensor of a layer, or of each expert of it; ``name`` is that of the checkpoint below the layer, with
    ``{}`` for the expert's number. ``dim``: the dimension that is cut."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = "whole"
    dim: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Layer:
    """One kind of layer: its tensors, and how many experts it has (0: dense)."""

    tensors: tuple[Tensor, ...]
    experts: int = 0

    @cached_property
    def numel(self) -> dict[Cut, int]:
        """Elements of the unsharded layer, all experts included, by their cut."""
        elements: dict[Cut, int] = {"whole": 0, "tp": 0, "kv": 0, "expert": 0}
        for tensor in self.tensors:
            elements[tensor.cut] += tensor.numel * (self.experts if tensor.cut == "expert" else 1)
        return elements

    @property
    def dense(self) -> int:
        """Elements outside the experts."""
        return sum(self.numel.values()) - self.numel["expert"]


@dataclass(frozen=True)
class Shape:
    """A model. ``layers``: the kind of each layer; ``embed`` and ``head``: the tensors before and after the layers.

    ``kv_elements``: elements of the KV cache per token and layer; ``kv_heads``: the heads they are sharded by, 0 where
    every TP rank holds all of them (MLA's latent). ``qkv_width``, ``mlp_width``: elements per token inside a layer,
    before TP.
    """

    name: str
    vocab_size: int
    hidden_size: int
    heads: int
    layers: tuple[Layer, ...]
    embed: Tensor
    head: tuple[Tensor, ...]
    tied: bool
    kv_elements: int
    kv_heads: int
    qkv_width: int
    mlp_width: int
    top_k: int = 0
    expert_width: int = 0
    config: ModelConfig | None = None

    @cached_property
    def kinds(self) -> dict[Layer, int]:
        """Kind of layer → number of layers."""
        return dict(Counter(self.layers))

    @cached_property
    def experts(self) -> int:
        """Number of experts of a sparse layer; 0 in a dense model."""
        return max(layer.experts for layer in self.layers)

    @cached_property
    def routed(self) -> int:
        """Elements of all experts of all layers."""
        return sum(layer.numel["expert"] for layer in self.layers)

    @cached_property
    def dense(self) -> int:
        """Elements outside the experts, embedding and head included."""
        ends = self.embed.numel + sum(tensor.numel for tensor in self.head)
        return ends + sum(layer.dense for layer in self.layers)

    @property
    def numel(self) -> int:
        return self.dense + self.routed

    @property
    def active(self) -> int:
        """Elements a token is multiplied with: neither the experts it is not routed to nor the embedding."""
        chosen = self.routed * self.top_k // self.experts if self.experts else 0
        return self.dense + chosen - (0 if self.tied else self.embed.numel)

    def kv_bytes(self, tp: int, pp: int = 1, itemsize: int = 2) -> int:
        """Bytes of one token's KV cache on one rank of the longest pipeline stage."""
        return int(self.kv_elements_of_rank(tp)) * -(-len(self.layers) // pp) * itemsize

    def kv_elements_of_rank(self, tp: int) -> float:
        """Returns the elements of the KV cache per token and layer on the TP rank that has most."""
        return self.kv_elements * (-(-self.kv_heads // tp) / self.kv_heads if self.kv_heads else 1)

    @classmethod
    def from_hf(cls, name: str, hf: Mapping[str, Any], key: str = "model") -> Shape:
        """Reads the fields of a `config.json` of Qwen3, Qwen3-MoE, DeepSeek-V3 or openPangu-Ultra-MoE.

        Raises:
            ValueError: another architecture, or a missing field, by name.
        """
        kind = hf.get("model_type")
        try:
            if kind in MLA:
                return _latent(name, {PANGU_NAMES.get(field, field): value for field, value in hf.items()})
            if kind not in GROUPED:
                raise ValueError(f"model_type {kind!r} is not supported; expected one of {list(GROUPED)}")
            config = ModelConfig.from_hf(dict(hf))
        except KeyError as missing:
            raise ValueError(f"{key}={name}: its config lacks {missing}") from None
        except ValueError as error:
            raise ValueError(f"{key}={name}: {error}; or one of {list(MLA)}, which can be planned for") from None
        return cls.from_config(name, config)

    @classmethod
    def from_config(cls, name: str, config: ModelConfig) -> Shape:
        """Converts the config of a model that `fusion.model` trains.

        Raises:
            ValueError: a family, or layers, that this description does not cover yet.
        """
        same = all(layer == config.layers[0] for layer in config.layers)
        if config.family not in GROUPED or not same or config.grouped_query.qkv_bias:
            raise ValueError(
                f"model={name}: {config.family!r} is not supported with these layers; expected one of {list(GROUPED)} "
                f"with layers of one kind, without biases, or one of {list(MLA)}, which can be planned for"
            )
        return _grouped(name, config)


def _grouped(name: str, config: ModelConfig) -> Shape:
    """Grouped-query attention, all layers of one kind: what `fusion.model` trains."""
    d, c = config.hidden_size, config.head_dim
    q, kv = config.num_heads * c, config.num_kv_heads * c
    attention = (
        Tensor("input_layernorm.weight", (d,)),
        Tensor("self_attn.q_proj.weight", (q, d), "tp"),
        Tensor("self_attn.k_proj.weight", (kv, d), "kv"),
        Tensor("self_attn.v_proj.weight", (kv, d), "kv"),
        Tensor("self_attn.q_norm.weight", (c,)),
        Tensor("self_attn.k_norm.weight", (c,)),
        Tensor("self_attn.o_proj.weight", (d, q), "tp", dim=1),
        Tensor("post_attention_layernorm.weight", (d,)),
    )
    if config.num_experts:
        experts = _mlp("mlp.experts.{}", d, config.moe_intermediate_size, cut="expert")
        layer = Layer((*attention, Tensor("mlp.gate.weight", (config.num_experts, d)), *experts), config.num_experts)
    else:
        layer = Layer((*attention, *_mlp("mlp", d, config.intermediate_size, cut="tp")))
    return Shape(
        name=name,
        layers=(layer,) * config.num_layers,
        tied=config.tie_embeddings,
        kv_elements=2 * kv,
        kv_heads=config.num_kv_heads,
        qkv_width=q + 2 * kv,
        mlp_width=config.intermediate_size if not config.num_experts else 0,
        heads=config.num_heads,
        top_k=config.top_k,
        expert_width=config.moe_intermediate_size,
        config=config,
        **_ends(config.vocab_size, d, config.tie_embeddings),
    )


def _latent(name: str, hf: Mapping[str, Any]) -> Shape:
    """Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1), leading dense layers, shared experts."""
    d, heads, f = hf["hidden_size"], hf["num_attention_heads"], hf["moe_intermediate_size"]
    q_rank, kv_rank, rope = hf["q_lora_rank"], hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    nope, value = hf["qk_nope_head_dim"], hf["v_head_dim"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if hf["model_type"] == "pangu_ultra_moe":
        norms += ["pre_mlp_layernorm", "post_mlp_layernorm"]
    queries: tuple[Tensor, ...] = (Tensor("self_attn.q_proj.weight", (heads * (nope + rope), d), "tp"),)
    if q_rank is not None:
        queries = (
            Tensor("self_attn.q_a_proj.weight", (q_rank, d)),
            Tensor("self_attn.q_a_layernorm.weight", (q_rank,)),
            Tensor("self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank), "tp"),
        )
    attention = (
        *(Tensor(f"{norm}.weight", (d,)) for norm in norms),
        *queries,
        Tensor("self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, d)),
        Tensor("self_attn.kv_a_layernorm.weight", (kv_rank,)),
        Tensor("self_attn.kv_b_proj.weight", (heads * (nope + value), kv_rank), "tp"),
        Tensor("self_attn.o_proj.weight", (d, heads * value), "tp", dim=1),
    )
    experts, dense = hf["n_routed_experts"], hf["first_k_dense_replace"]
    router = [Tensor("mlp.gate.weight", (experts, d))]
    if hf["model_type"] == "deepseek_v3":
        router.append(Tensor("mlp.gate.e_score_correction_bias", (experts,)))
    shared = _mlp("mlp.shared_experts", d, f * hf["n_shared_experts"], cut="tp")
    sparse = Layer((*attention, *router, *shared, *_mlp("mlp.experts.{}", d, f, cut="expert")), experts)
    first = Layer((*attention, *_mlp("mlp", d, hf["intermediate_size"], cut="tp")))
    return Shape(
        name=name,
        layers=(first,) * dense + (sparse,) * (hf["num_hidden_layers"] - dense),
        tied=hf["tie_word_embeddings"],
        kv_elements=kv_rank + rope,
        kv_heads=0,
        qkv_width=heads * (2 * (nope + rope) + value),
        mlp_width=hf["intermediate_size"],
        heads=heads,
        top_k=hf["num_experts_per_tok"],
        expert_width=f,
        **_ends(hf["vocab_size"], d, hf["tie_word_embeddings"]),
    )


def _mlp(name: str, hidden: int, width: int, cut: Cut) -> tuple[Tensor, ...]:
    return (
        Tensor(f"{name}.gate_proj.weight", (width, hidden), cut),
        Tensor(f"{name}.up_proj.weight", (width, hidden), cut),
        Tensor(f"{name}.down_proj.weight", (hidden, width), cut, dim=1),
    )


def _ends(vocab: int, hidden: int, tied: bool) -> dict[str, Any]:
    head = (Tensor("lm_head.weight", (vocab, hidden), "tp"),) if not tied else ()
    return dict(
        vocab_size=vocab,
        hidden_size=hidden,
        embed=Tensor("model.embed_tokens.weight", (vocab, hidden), "tp"),
        head=(Tensor("model.norm.weight", (hidden,)), *head),
    )


def boxes(shape: Shape, parallel: Parallel, rank: int) -> Iterator[tuple[str, Box]]:
    """Yields every box of a global tensor that a rank holds: (checkpoint name, one (start, stop) per dimension)."""
    stage = parallel.coordinate("pp", rank)
    if stage == 0 or (shape.tied and stage == parallel.pp - 1):
        yield shape.embed.name, _box(shape.embed, shape, parallel, rank=rank)
    for index in parallel.layers(len(shape.layers), stage):
        layer = shape.layers[index]
        here = layer.experts // parallel.ep
        first = parallel.coordinate("ep", rank) * here
        for tensor in layer.tensors:
            for expert in range(first, first + here) if tensor.cut == "expert" else (0,):
                yield f"model.layers.{index}.{tensor.name.format(expert)}", _box(tensor, shape, parallel, rank=rank)
    if stage == parallel.pp - 1:
        for tensor in shape.head:
            yield tensor.name, _box(tensor, shape, parallel, rank=rank)


def _box(tensor: Tensor, shape: Shape, parallel: Parallel, rank: int) -> Box:
    box = [(0, size) for size in tensor.shape]
    if tensor.cut != "whole":
        axis = "etp" if tensor.cut == "expert" else "tp"
        units = shape.kv_heads if tensor.cut == "kv" else 0
        first, stop, of = share(parallel.coordinate(axis, rank), getattr(parallel, axis), units)  # type: ignore[arg-type]
        size = tensor.shape[tensor.dim]
        box[tensor.dim] = (first * size // of, stop * size // of)
    return tuple(box)


def share(index: int, ranks: int, units: int = 0) -> tuple[int, int, int]:
    """Returns the share of a cut dimension that rank ``index`` of ``ranks`` holds, as (first, stop, of).

    Args:
        units: indivisible units (key/value heads) of the dimension; 0: divisible anywhere.
    """
    if units and ranks > units:
        first = index * units // ranks
        return first, first + 1, units
    return index, index + 1, ranks
