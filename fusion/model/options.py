"""Define the config groups `model` and `parallel`: the checkpoint, its data type and the layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusion.telemetry.keys import POSITIVE, Unsupported, key
from fusion.telemetry.validation import Checks, Group

if TYPE_CHECKING:
    import torch


@dataclass
class PolicyModelConfig(Group, path="model"):
    """The base model of the policy. Its shape is a `ModelConfig`, read from its folder."""

    path: str = key("", read_by="plan simulate")
    """Hugging Face folder of the base model: config.json, safetensors, tokenizer."""
    dtype: str = key("float32", one_of=("float32", "bfloat16"))
    """Data type of the compute weights: `float32`, or `bfloat16` with float32 master weights in the optimizer."""
    adapter: str | None = key(None, only={"training.lora.rank": POSITIVE}, timeless=True)
    """Folder of `peft` with the adapters that the run starts from; null: they begin as its base model."""

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)


@dataclass
class LayoutConfig:
    """Sizes of one layout; data parallel uses the remaining cards."""

    tp: int = key(1, at_least=1)
    """Tensor parallel: ranks that split the attention and dense layers of a token."""
    ep: int = key(1, at_least=1)
    """Expert parallel: ranks that the experts are distributed over."""
    pp: int = key(1, at_least=1)
    """Pipeline parallel: stages of consecutive layers, each on its own ranks."""
    etp: int = key(1, at_least=1)
    """Expert-tensor parallel: ranks that split one expert."""


@dataclass
class TrainLayoutConfig(LayoutConfig):
    """Sizes of the layout of training."""

    cp: int = key(1, at_least=1, unsupported_by={"megatron": Unsupported("each rank has whole sequences")})
    """Context parallel: data-parallel ranks that share the samples of one replica, each with a part of their rows, so
    that longer samples fit; it divides the data-parallel ranks and the attention heads of a TP rank."""


@dataclass
class InferLayoutConfig(LayoutConfig):
    """Sizes of the layout of generation."""

    dcp: int = key(1, at_least=1, unsupported_by={"vllm": Unsupported("its KV cache is not divided so")})
    """Decode context parallel: neighbouring tensor-parallel ranks that share the KV of each sequence instead of holding
    copies, so that the KV cache has as many times the tokens; it divides tp / num_key_value_heads, with latent
    attention tp, and excludes rollout.engine.batch_invariant."""


@dataclass
class ParallelConfig(Group, path="parallel"):
    """The layouts of a run."""

    train: TrainLayoutConfig = key(factory=TrainLayoutConfig, read_by="plan simulate")
    """Layout of the training phase; data parallel uses the remaining cards."""
    infer: InferLayoutConfig = key(factory=InferLayoutConfig, read_by="plan simulate")
    """Layout of the generation phase; cards beyond one TP/EP group become further engines."""
    score: LayoutConfig = field(default_factory=LayoutConfig)
    """Layout of the reward model over the cards that host it, and of the reference model where it has its own cards;
    pp must be 1, and a dense model ignores ep and etp."""

    def check(self, check: Checks) -> None:
        for name in ("train", "infer", "score"):
            Checks(f"{check.group}.{name}", getattr(self, name)).declared()
