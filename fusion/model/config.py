"""Read the shape of a model from a Hugging Face `config.json` and write it back."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion.model.hf_fields import Fields

ARCHITECTURES = {"qwen3_moe": "Qwen3Moe", "qwen3": "Qwen3"}
"""model_type → the stem of the architecture's name in transformers."""

CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class ModelConfig:
    """Holds the shape of a Qwen3 or Qwen3-MoE model.

    ``num_experts == 0`` is the dense model; every layer of a MoE model is sparse. ``num_labels > 0`` is a reward model
    (`Qwen3ForSequenceClassification`): its head returns ``num_labels`` scores instead of logits.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    top_k: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    router_aux_coef: float = 0.0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_positions: int = 32768
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_labels: int = 0

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any], key: str = "model.path") -> ModelConfig:
        """Read the config of a checkpoint folder, or of the dictionary of its `config.json`. Of a folder, the end
        tokens are those of `generation_config.json`, if it names any, as in transformers' `generate`.

        Args:
            key: the user's config key that named the folder, for error messages.

        Raises:
            ValueError: there is no `config.json`, it is malformed, or it sets a field (named) that is not supported.
        """
        if isinstance(source, dict):
            return cls._of_fields(source, f"{key}: config.json", key)
        path = Path(source) / "config.json"
        config = cls._of_fields(read_json(path, key), f"{key}: {path}", key)
        generation = Path(source) / GENERATION
        if not generation.is_file():
            return config
        ends = Fields(read_json(generation, key), f"{key}: {generation}").tokens("eos_token_id")
        return replace(config, eos_token_ids=ends or config.eos_token_ids)

    @classmethod
    def _of_fields(cls, hf: dict[str, Any], place: str, key: str) -> ModelConfig:
        kind = hf.get("model_type")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            raise ValueError(f"{key}: model_type {kind!r} is not supported; expected one of {list(ARCHITECTURES)}")
        fields = Fields(hf, place)
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        # transformers: 128 in Qwen3Config; Qwen3MoeConfig has no such field.
        of_kind = hidden // heads if kind == "qwen3_moe" or "head_dim" in hf else 128
        config = cls(
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.size("intermediate_size"),
            num_layers=fields.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.size("num_key_value_heads"),
            head_dim=fields.optional_size("head_dim") or of_kind,
            norm_topk_prob=False,
            rope_theta=fields.rope_theta(10000.0),
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            max_positions=fields.size("max_position_embeddings", 32768),
            initializer_range=fields.non_negative("initializer_range", 0.02),
            eos_token_ids=fields.tokens("eos_token_id"),
            pad_token_id=fields.token("pad_token_id"),
            num_labels=_labels(hf, fields, ARCHITECTURES[kind]),
        )
        if kind == "qwen3_moe":
            config = replace(
                config,
                num_experts=_experts(hf, fields, place),
                top_k=fields.size("num_experts_per_tok"),
                moe_intermediate_size=fields.size("moe_intermediate_size"),
                norm_topk_prob=fields.flag("norm_topk_prob", False),
                router_aux_coef=fields.non_negative("router_aux_loss_coef", 0.001),
            )
        fields.refuse_rest()
        config._check(place)
        return config

    def _check(self, place: str) -> None:
        """Check what the fields must satisfy together.

        Raises:
            ValueError: names the fields.
        """
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{place}: num_attention_heads={self.num_heads} is no multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.num_experts and self.top_k > self.num_experts:
            raise ValueError(f"{place}: num_experts_per_tok={self.top_k} exceeds num_experts={self.num_experts}")

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Return the `config.json` of this model as transformers writes it."""
        kind = "qwen3_moe" if self.num_experts else "qwen3"
        hf: dict[str, Any] = {
            "architectures": [ARCHITECTURES[kind] + (CLASSIFIER if self.num_labels else CAUSAL)],
            "model_type": kind,
            "dtype": dtype,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "initializer_range": self.initializer_range,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None,
            "pad_token_id": self.pad_token_id,
        }
        if self.num_labels:
            hf |= {"id2label": {str(label): f"LABEL_{label}" for label in range(self.num_labels)}}
        if self.num_experts:
            hf |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.top_k,
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "router_aux_loss_coef": self.router_aux_coef,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        return hf


def read_json(path: Path, key: str = "model.path") -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint folder.

    Raises:
        ValueError: the file does not exist, or holds something else (named, with the config key).
    """
    if not path.is_file():
        raise ValueError(f"{key}: {path} does not exist; expected a Hugging Face checkpoint folder")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{key}: {path} holds a {type(found).__name__}; expected a JSON object")
    return found


def _labels(hf: dict[str, Any], fields: Fields, architecture: str) -> int:
    """Return the number of scores of a reward model's head; 0 for a language model. transformers lists the labels
    unless there are 2."""
    labels, number = fields.table("id2label"), fields.size("num_labels", 2)
    for name in fields.texts("architectures"):
        if name == architecture + CLASSIFIER:
            return len(labels) or number
        if name != architecture + CAUSAL:
            fields.refuse("architectures", hf["architectures"])
    return 0


def _experts(hf: dict[str, Any], fields: Fields, place: str) -> int:
    """Return the number of experts, which transformers also calls `num_local_experts`."""
    stated = {name: fields.size(name) for name in ("num_experts", "num_local_experts") if name in hf}
    if len(set(stated.values())) > 1:
        raise ValueError(f"{place} contradicts itself: {stated}")
    return next(iter(stated.values())) if stated else fields.size("num_experts")
