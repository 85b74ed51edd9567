"""Fuse operators for tensors in the host's memory: those of the plain CPU and of an emulated card.

    fused.cpp, vector.h ──g++, once──► cache folder ──► torch.ops.rlfusion.{rms_norm, norm_rope, paged_attention, …}

A decode step of a small model takes its time in starting operators, not in arithmetic. Where a card has fused kernels
of its own, the host's counterpart does in one operator what PyTorch does in ten. They compute in float32, row by row: a
row's bits depend neither on the rest of its batch nor on the processor. In another dtype, and without a compiler, the
functions are the plain ones, which round differently. Only generation, which runs in inference mode, is fused: all
log-probabilities that a trainer compares are computed alike, with gradients and without."""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fusion.npu.compiler import BuildError, Library, build
from fusion.npu.operators.gating import Gating
from fusion.npu.operators.plain import Counts, Matrices, Permuted, Plain, Rope
from fusion.npu.operators.plain_attention import PagedRows

HERE = Path(__file__).parent
FLAGS = "-O3 -fPIC -std=c++20 -w -Wno-psabi -fvisibility=hidden -ffp-contract=off -fno-math-errno".split()
OPERATORS = """
rms_norm norm_rope store_kv paged_attention paged_latent_attention gate permute swiglu experts unpermute""".split()
"""Functions of `fused.cpp`, which gives their arguments"""


def _fused(name: str) -> Callable[..., Any]:
    """Return the method that passes its arguments to the fused operator of this name, or to the composed one."""
    composed = getattr(Plain, name)

    def call(self: Any, *args: Any) -> Any:
        fused = self._fused_for(args[0])
        return composed(self, *args) if fused is None else getattr(fused, name)(*args)

    return call


class Cpu(Plain):
    """The host's table. The library is built when the first operator is needed."""

    name = "cpu"
    rms_norm, swiglu, unpermute, store_kv = map(_fused, ("rms_norm", "swiglu", "unpermute", "store_kv"))

    def _fused_for(self, like: Tensor) -> Any:
        """Return the operators by name; None: those of PyTorch run."""
        if like.dtype is not torch.float32 or not torch.is_inference_mode_enabled():
            return None
        return load()

    def norm_rope(
        self, qkv_NhC: Tensor, q_norm_C: Tensor | None, k_norm_C: Tensor | None, rope: Rope, kv_heads: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if (fused := self._fused_for(qkv_NhC)) is None:
            return super().norm_rope(qkv_NhC, q_norm_C, k_norm_C, rope, kv_heads, eps)
        q, k = fused.norm_rope(qkv_NhC, q_norm_C, k_norm_C, *rope, kv_heads, eps)
        return q, k, qkv_NhC[:, -kv_heads:]

    def gate(
        self, logits_NE: Tensor, gating: Gating, correction_E: Tensor | None, row_multiple: int = 1
    ) -> tuple[Tensor, Tensor]:
        if not gating.plain or (fused := self._fused_for(logits_NE)) is None:
            return super().gate(logits_NE, gating, correction_E, row_multiple)
        return fused.gate(logits_NE, gating.top_k, gating.normalise)

    def permute(self, x_ND: Tensor, expert_Nk: Tensor, num_experts: int) -> Permuted:
        if (fused := self._fused_for(x_ND)) is None:
            return super().permute(x_ND, expert_Nk, num_experts)
        return Permuted(*fused.permute(x_ND, expert_Nk, num_experts))

    def takes_counts(self, x: Tensor, experts: int, row_multiple: int = 1) -> bool:
        return self._fused_for(x) is not None

    def experts(self, x: Tensor, counts: Counts, matrices: Matrices, row_multiple: int = 1) -> Tensor:
        if not isinstance(counts, Tensor) or (fused := self._fused_for(x)) is None:
            return super().experts(x, counts, matrices, row_multiple)
        return fused.experts(x, counts, *matrices, row_multiple)

    def reads_blocks(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float32 and torch.is_inference_mode_enabled() and load() is not None

    def paged_attention(
        self, q_NHC: Tensor, pool: Tensor, rows: PagedRows, value_width: int | None, scale: float
    ) -> Tensor:
        if self._fused_for(q_NHC) is None:
            return super().paged_attention(q_NHC, pool, rows, value_width, scale)
        return self.partial_attention(q_NHC, pool, rows, value_width, scale)[0]

    def partial_attention(
        self, q_NHC: Tensor, pool: Tensor, rows: PagedRows, value_width: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        if (fused := self._fused_for(q_NHC)) is None:
            return super().partial_attention(q_NHC, pool, rows, value_width, scale)
        if value_width is None:
            return fused.paged_attention(q_NHC, pool, *rows[:3])  # scaled by 1 / sqrt(C)
        return fused.paged_latent_attention(q_NHC, pool, *rows[:3], value_width, scale)


@cache
def load() -> SimpleNamespace | None:
    """Build the library if needed (10 s) and load it; None, with one warning, if it cannot be built. Looking an
    operator up in `torch.ops` takes longer than some of them."""
    try:
        path = build(_library())
        torch.ops.load_library(str(path))
    except (BuildError, OSError) as error:
        warnings.warn(f"Generation is slower than it could be: no fused operators ({error}).", stacklevel=2)
        return None
    return SimpleNamespace(**{name: getattr(torch.ops.rlfusion, name).default for name in OPERATORS})


def _library() -> Library:
    root = Path(torch.__file__).parent
    header = (HERE / "vector.h").read_bytes()
    return Library(
        kind="fused",
        name="rlfusion_fused",
        units={"fused": (HERE / "fused.cpp").read_text()},
        flags=FLAGS,
        includes=(HERE, root / "include", root / "include/torch/csrc/api/include"),
        links=(f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"),
        key=(header, torch.__version__.encode(), str(root).encode()),
    )
