"""Fuse operators for tensors in the host's memory: those of the plain CPU and of an emulated card.

    fused.cpp, vector.h ──g++, once──► cache folder ──► torch.ops.rlfusion.{rms_norm, norm_rope, paged_attention, …}

A decode step of a small model takes its time in starting operators, not in arithmetic. Where a card has fused kernels
of its own, the host's counterpart does in one operator what PyTorch does in ten. They compute in float32, row by row: a
row's bits depend neither on the rest of its batch nor on the processor. Everywhere else, and without a compiler, the
same functions are composed of PyTorch's operators, which round differently. Only generation, which runs in inference
mode, uses them: all log-probabilities that a trainer compares are computed alike, with gradients and without.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fusion.npu.compiler import BuildError, Library, build

HERE = Path(__file__).parent
FLAGS = (
    "-O3",
    "-fPIC",
    "-std=c++20",
    "-w",
    "-Wno-psabi",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
)


class Operators:
    """The operators, of which `fused.cpp` gives the arguments. An attribute each: looking one up in `torch.ops` takes
    longer than some of them."""

    def __init__(self, namespace: Any) -> None:
        self.rms_norm = namespace.rms_norm.default
        self.norm_rope = namespace.norm_rope.default
        self.store_kv = namespace.store_kv.default
        self.paged_attention = namespace.paged_attention.default
        self.paged_latent_attention = namespace.paged_latent_attention.default
        self.route = namespace.route.default
        self.dispatch = namespace.dispatch.default
        self.swiglu = namespace.swiglu.default
        self.experts = namespace.experts.default
        self.combine = namespace.combine.default


def operators_for(like: torch.Tensor) -> Operators | None:
    """Return the operators for tensors of this dtype and device; None where the function is to be composed of PyTorch's
    operators: outside inference mode, in another dtype, on a real card, without a compiler."""
    if like.dtype is not torch.float32 or not torch.is_inference_mode_enabled():
        return None
    return _operators(like.device.type)


@cache
def _operators(device_type: str) -> Operators | None:
    if device_type == "npu":
        from fusion.npu import emulator

        return _load() if emulator.is_installed() else None
    return _load() if device_type == "cpu" else None


@cache
def _load() -> Operators | None:
    """Build the library if needed (10 s) and load it; None, with one warning, if it cannot be built."""
    try:
        path = build(_library())
        torch.ops.load_library(str(path))
    except (BuildError, OSError) as error:
        warnings.warn(f"Generation is slower than it could be: no fused operators ({error}).", stacklevel=2)
        return None
    return Operators(torch.ops.rlfusion)


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
