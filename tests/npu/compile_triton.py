"""Compile every Triton kernel for a card of compute capability 9.0, which need not be there: `python -m
tests.npu.compile_triton` prints the kernels, and fails where one does not compile."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from fusion.npu.operators import triton_attention, triton_experts

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 163 << 10
"""Shared memory of a program on an A100; an H100 has more"""
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


def compile_instead(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
    """Compile a kernel for what it is called with."""
    settings = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    values = dict(zip(self.arg_names, args, strict=False)) | options
    types, constants = {}, {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            types[name] = TYPES[value.dtype]
        elif name in options or value is None:
            types[name], constants[name] = "constexpr", value
        else:
            types[name] = "fp32" if isinstance(value, float) else "i32"
    compiled = triton.compile(ASTSource(self, types, constants), target=TARGET, options=settings)
    assert compiled.metadata.shared <= SHARED_BYTES, (self.__name__, compiled.metadata.shared)
    print(self.__name__)


def main() -> None:
    JITFunction.run = compile_instead

    def half(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    x, weight, rope = half(3, 64), half(64), torch.zeros(3, 1, 16)
    triton_attention.add_rms_norm(x, x, weight, 1e-6)
    triton_attention.norm_rope(half(3, 8, 16), weight[:16], weight[:16], rope, rope, 2, 1e-6)
    slots = torch.zeros(24, dtype=torch.int64)
    triton_attention.store(half(8, 2, 64, 16), slots, half(3, 2, 16), half(3, 2, 16), torch.zeros(1, dtype=torch.int64))
    blocks, lengths = torch.zeros(3, 16, dtype=torch.int32), torch.ones(3, dtype=torch.int64)
    for channels in (128, 256):
        pool = half(9, 2, 64, channels)
        for longest in (20, 1000):
            triton_attention.attend(half(3, 4, channels), pool, pool, blocks, lengths, longest, 0.1, invariant=True)
    weights, chosen = triton_experts.gate(torch.zeros(3, 128), 8, normalise=True)
    routed = triton_experts.route(chosen, 128)
    triton_experts.gather(x, routed.sources)
    triton_experts.swiglu(x)
    triton_experts.unroute(half(24, 64), routed.places, weights, routed.ends)


if __name__ == "__main__":
    main()
