"""Config groups `model` and `parallel`: which checkpoint, in which arithmetic, in which layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")


@dataclass
class ModelOptions:
    path: str = ""
    """Hugging Face folder of the base model: config.json, safetensors, tokenizer."""
    dtype: str = "float32"
    """float32, or bfloat16 with float32 master weights in the optimizer."""

    def validate(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)


@dataclass
class LayoutOptions:
    tp: int = 1
    """Tensor parallel: ranks that share a token's attention and dense layers."""
    ep: int = 1
    """Expert parallel: ranks the experts are dealt out over."""
    pp: int = 1
    """Pipeline parallel: runs of layers on ranks of their own."""
    etp: int = 1
    """Expert-tensor parallel: ranks that share one expert."""


@dataclass
class ParallelOptions:
    train: LayoutOptions = field(default_factory=LayoutOptions)
    """Layout of the training phase; data parallel is what is left of the cards."""
    infer: LayoutOptions = field(default_factory=LayoutOptions)
    """Layout of the generation phase; cards beyond one TP/EP group become further engines."""
    score: LayoutOptions = field(default_factory=LayoutOptions)
    """Layout of the reward model over the cards that host it, and of the reference where it has cards of its own; pp
    is 1, and a dense model ignores ep and etp."""
