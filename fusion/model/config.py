"""Read the shape of a model from a Hugging Face `config.json` and write it back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {"qwen3_moe": "Qwen3Moe", "qwen3": "Qwen3"}
"""model_type → the stem of the architecture's name in transformers."""

CLASSIFIER = "ForSequenceClassification"


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
        """Read the config of a checkpoint folder, or of the dictionary of its `config.json`.

        Args:
            key: the user's config key that named the folder, for error messages.

        Raises:
            ValueError: there is no `config.json`, or an architecture or feature (named) is not supported.
        """
        hf = source if isinstance(source, dict) else read_json(Path(source) / "config.json", key)
        kind = hf.get("model_type")
        if kind not in ARCHITECTURES:
            raise ValueError(f"{key}: model_type {kind!r} is not supported; expected one of {list(ARCHITECTURES)}")
        _refuse_unsupported(hf, key)
        sparse = kind == "qwen3_moe"
        rope: dict[str, Any] = hf.get("rope_parameters") or {}
        eos = hf.get("eos_token_id")
        return cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf["num_key_value_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            num_experts=(hf.get("num_experts") or hf.get("num_local_experts") or 0) if sparse else 0,
            top_k=hf.get("num_experts_per_tok", 0) if sparse else 0,
            moe_intermediate_size=hf.get("moe_intermediate_size", 0) if sparse else 0,
            norm_topk_prob=hf.get("norm_topk_prob", False),
            router_aux_coef=hf.get("router_aux_loss_coef", 0.0) if sparse else 0.0,
            rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            tie_embeddings=hf.get("tie_word_embeddings", False),
            max_positions=hf.get("max_position_embeddings", 32768),
            initializer_range=hf.get("initializer_range", 0.02),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            pad_token_id=hf.get("pad_token_id"),
            num_labels=_labels(hf),
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Return the `config.json` of this model as transformers writes it."""
        kind = "qwen3_moe" if self.num_experts else "qwen3"
        hf: dict[str, Any] = {
            "architectures": [ARCHITECTURES[kind] + (CLASSIFIER if self.num_labels else "ForCausalLM")],
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
    """Read a JSON file of a checkpoint folder.

    Raises:
        ValueError: the file does not exist (named, with the config key).
    """
    if not path.is_file():
        raise ValueError(f"{key}: {path} does not exist; expected a Hugging Face checkpoint folder")
    return json.loads(path.read_text())


def _labels(hf: dict[str, Any]) -> int:
    """Return the number of scores of a reward model's head; 0 for a language model. transformers lists the labels
    unless there are 2."""
    if not any(name.endswith(CLASSIFIER) for name in hf.get("architectures") or ()):
        return 0
    return len(hf["id2label"]) if "id2label" in hf else hf.get("num_labels", 2)


def _refuse_unsupported(hf: dict[str, Any], key: str) -> None:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    unsupported = {
        "rope_type": rope.get("rope_type", rope.get("type", "default")) not in (None, "default"),
        "attention_bias": bool(hf.get("attention_bias")),
        "use_sliding_window": bool(hf.get("use_sliding_window")),
        "mlp_only_layers": bool(hf.get("mlp_only_layers")),
        "decoder_sparse_step": hf.get("decoder_sparse_step", 1) != 1,
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
    }
    for name, refused in unsupported.items():
        if refused:
            raise ValueError(f"{key}: config.json sets {name}={hf.get(name, rope)!r}, which is not supported")
