"""Read a model's specification from a Hugging Face `config.json` and write it back."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fusion.model.adapters import Adapters
from fusion.model.families import ALIASES, FAMILIES
from fusion.model.families.base import Family
from fusion.model.hf_fields import Fields
from fusion.model.hf_quantization import read_quantization
from fusion.model.hf_rotary import write_rotary
from fusion.model.spec import AttentionSpec, Dense, GroupedQuery, Latent, LayerSpec, Sparse
from fusion.model.stored import read_json, tensor_names

CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class ModelConfig:
    """Hold the specification of a model: one `LayerSpec` per layer, and what is before and after the layers.

    ``num_labels > 0`` is a reward model (`Qwen3ForSequenceClassification`): its head returns ``num_labels`` scores
    instead of logits. ``family``: the `model_type`. ``num_predictors``: layers after the last that predict further
    tokens, of its kind; they are loaded and exported, and neither computed with nor trained. ``masked_ids``: ascending
    ranges [start, stop) of ids that no token has (`IdMask`); not in the folder, as they depend on the tokenizer.
    ``adapters``: those that are trained in place of the model's own tensors; None: there are none.

    Invariants: all layers have the same attention, so that a token has the same KV cache and the same rotation in each;
    all sparse layers have the same experts, so that a routing column holds any of them."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    router_aux_coef: float = 0.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_positions: int = 32768
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_labels: int = 0
    num_predictors: int = 0
    masked_ids: tuple[tuple[int, int], ...] = ()
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        assert all(layer.attention == self.attention for layer in self.layers)
        assert all(layer.mlp == self._sparse for layer in self.layers if isinstance(layer.mlp, Sparse))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def predictors(self) -> range:
        """The numbers of the layers that predict further tokens."""
        return range(self.num_layers, self.num_layers + self.num_predictors)

    @cached_property
    def base(self) -> "ModelConfig":
        """The model without adapters."""
        return replace(self, adapters=None)

    @cached_property
    def without_predictors(self) -> "ModelConfig":
        """The model that an engine holds."""
        return replace(self, num_predictors=0)

    def layer(self, index: int) -> LayerSpec:
        """Return a layer's specification; a predictor's is that of the last layer."""
        return self.layers[min(index, self.num_layers - 1)]

    @property
    def attention(self) -> AttentionSpec:
        """The attention of every layer."""
        return self.layers[0].attention

    @property
    def grouped_query(self) -> GroupedQuery:
        """The attention of every layer of a model without latent attention."""
        assert isinstance(self.attention, GroupedQuery), f"{self.family} has latent attention"
        return self.attention

    @property
    def every_masked_id(self) -> list[int]:
        return [id for start, stop in self.masked_ids for id in range(start, stop)]

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values that TP cuts; of latent attention, whose latents every TP rank holds, all heads."""
        return self.num_heads if isinstance(self.attention, Latent) else self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @cached_property
    def _sparse(self) -> Sparse | None:
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, Sparse)), None)

    @property
    def experts(self) -> Sparse:
        """The experts of every sparse layer. The model must have one."""
        assert self._sparse is not None, "a dense model has no experts"
        return self._sparse

    @property
    def num_experts(self) -> int:
        """Experts of a sparse layer; 0 in a dense model."""
        return self._sparse.num_experts if self._sparse else 0

    @property
    def top_k(self) -> int:
        """Experts of a token in a sparse layer; 0 in a dense model."""
        return self._sparse.router.top_k if self._sparse else 0

    @property
    def moe_intermediate_size(self) -> int:
        """Inner channels of a routed expert; 0 in a dense model."""
        return self._sparse.width if self._sparse else 0

    @cached_property
    def dense_widths(self) -> tuple[tuple[str, int], ...]:
        """Inner channels of the MLPs that TP cuts, those of dense layers and of the shared expert, with their names."""
        widths = [("intermediate_size", layer.mlp.width) for layer in self.layers if isinstance(layer.mlp, Dense)]
        if self._sparse and self._sparse.shared:
            widths.append(("shared expert's intermediate size", self._sparse.shared.width))
        return tuple(dict.fromkeys(widths))

    def sparse(self, layers: range) -> range:
        """Return which of the model's sparse layers, counted from 0, are in a range of its layers."""
        before = sum(isinstance(layer.mlp, Sparse) for layer in self.layers[: layers.start])
        here = sum(isinstance(layer.mlp, Sparse) for layer in self.layers[layers.start : layers.stop])
        return range(before, before + here)

    @property
    def num_sparse_layers(self) -> int:
        return len(self.sparse(range(self.num_layers)))

    @property
    def family_spec(self) -> Family:
        """How the family's folders are read and written, and its tensors named."""
        return FAMILIES[self.family]

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any], key: str = "model.path") -> "ModelConfig":
        """Read the config of a checkpoint folder, or of the dictionary of its `config.json`. Of a folder, the end
        tokens are those of `generation_config.json`, if it names any, as in transformers' `generate`; and there are no
        predictors of further tokens if it holds no tensor of one. ``key``: the user's config key that named the folder,
        for error messages.
        Raise ValueError: there is no `config.json`, it is malformed, or it sets a field (named) that is not supported.
        """
        if isinstance(source, dict):
            return cls._of_fields(source, f"{key}: config.json", key)
        path = Path(source) / "config.json"
        config = cls._of_fields(read_json(path, key), f"{key}: {path}", key)
        if config.num_predictors and not _holds_layer(Path(source), config.num_layers, key):
            config = config.without_predictors
        generation = Path(source) / GENERATION
        if not generation.is_file():
            return config
        ends = Fields(read_json(generation, key), f"{key}: {generation}").tokens("eos_token_id")
        return replace(config, eos_token_ids=ends or config.eos_token_ids)

    @classmethod
    def _of_fields(cls, hf: dict[str, Any], place: str, key: str) -> "ModelConfig":
        kind = hf.get("model_type")
        kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise ValueError(
                f"{key}: model_type {kind!r} is not supported; expected one of {[*FAMILIES, *ALIASES]} "
                "(docs/model_family.md)"
            )
        family = FAMILIES[kind]
        fields, defaults = Fields(hf, place, family.renamed), family.defaults
        config = cls(
            family=kind,
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            layers=family.read(fields),
            rms_norm_eps=fields.positive("rms_norm_eps", defaults.rms_norm_eps),
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            max_positions=fields.size("max_position_embeddings", defaults.max_positions),
            initializer_range=fields.non_negative("initializer_range", 0.02),
            eos_token_ids=fields.tokens("eos_token_id", defaults.eos_token_id),
            pad_token_id=fields.token("pad_token_id", defaults.pad_token_id),
            num_labels=_labels(hf, fields, family),
        )
        if config.num_experts and family.router_aux_field:
            coef = fields.non_negative(family.router_aux_field, defaults.router_aux_coef)
            config = replace(config, router_aux_coef=coef)
        if family.predictors_field:
            config = replace(config, num_predictors=fields.count(family.predictors_field, 1))
        read_quantization(fields)  # of the files, not of the model: `load_weights` dequantizes
        fields.refuse_rest(family.only, family.inert)
        config._check(place)
        return config

    def _check(self, place: str) -> None:
        """Check what the fields must satisfy together. Raise ValueError: names the fields."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{place}: num_attention_heads={self.num_heads} is no multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if not self._sparse:
            return
        num_experts, router = self.num_experts, self.experts.router
        if self.top_k > num_experts:
            raise ValueError(f"{place}: num_experts_per_tok={self.top_k} exceeds num_experts={num_experts}")
        least = 2 if router.group_scores == "sum_of_two" else 1
        if router.groups > 1 and (num_experts % router.groups or num_experts < least * router.groups):
            raise ValueError(
                f"{place}: n_group={router.groups} does not cut n_routed_experts={num_experts} into equal groups of "
                f"{'two' if least == 2 else 'one'} or more"
            )
        if router.top_groups > router.groups or self.top_k > num_experts // router.groups * router.top_groups:
            raise ValueError(
                f"{place}: topk_group={router.top_groups} of n_group={router.groups} groups hold fewer than "
                f"num_experts_per_tok={self.top_k} experts"
            )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Return the `config.json` of this model as transformers writes it."""
        family, attention = self.family_spec, self.attention
        # transformers sizes rotary embeddings by head_dim
        head_dim = attention.rope_dim if isinstance(attention, Latent) else attention.head_dim
        hf: dict[str, Any] = {
            "architectures": [family.architecture + (CLASSIFIER if self.num_labels else CAUSAL)],
            "model_type": self.family,
            "dtype": dtype,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            **write_rotary(attention.rotary, head_dim, family.states_rotary_share),
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "initializer_range": self.initializer_range,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None,
            "pad_token_id": self.pad_token_id,
        }
        if self.num_labels:
            hf |= {"id2label": {str(label): f"LABEL_{label}" for label in range(self.num_labels)}}
        if family.router_aux_field:
            hf[family.router_aux_field] = self.router_aux_coef
        if family.predictors_field:
            hf[family.predictors_field] = self.num_predictors
        return hf | family.write(self)


def _holds_layer(folder: Path, index: int, key: str) -> bool:
    """Return whether a folder holds tensors of layer ``index``, or no weights at all: its config is all there is."""
    names = tensor_names(folder, key)
    return names is None or any(name.startswith(f"model.layers.{index}.") for name in names)


def _labels(hf: dict[str, Any], fields: Fields, family: Family) -> int:
    """Return the number of scores of a reward model's head; 0 for a language model. transformers lists the labels
    unless there are 2."""
    labels, number = fields.table("id2label"), fields.size("num_labels", 2)
    for name in fields.texts("architectures"):
        if family.classifier and name == family.architecture + CLASSIFIER:
            return len(labels) or number
        if name != family.architecture + CAUSAL:
            fields.refuse("architectures", hf["architectures"], ([family.architecture + CAUSAL],))
    return 0
