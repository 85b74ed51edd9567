"""`torch.npu`: options of the compiler, of precision and of layouts.

They permit the real card to compile, to round or to lay out tensors in other ways. The emulated one keeps to the plain
ways, which every option permits: an option is checked, stored and reported.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

VALUES: dict[str, tuple[str, ...]] = {
    "ACL_PRECISION_MODE": ("allow_fp32_to_fp16", "must_keep_origin_dtype"),
    "ACL_OP_SELECT_IMPL_MODE": ("high_performance", "high_precision"),
    "ACL_AICORE_NUM": tuple(map(str, range(1, 33))),
    "ACL_OP_DEBUG_LEVEL": ("0", "1", "2", "3", "4"),
    "ACL_OP_COMPILER_CACHE_MODE": ("disable", "enable", "force"),
}
"""Accepted values of the options that torch_npu checks."""

_options: dict[str, str] = {}
_nd_matmul = True
_task_queue = 1


def set_option(option: dict[str, Any]) -> None:
    """Set options of the card.

    Raises:
        TypeError: not a dict.
        ValueError: a value that torch_npu refuses, too.
    """
    if not isinstance(option, dict):
        raise TypeError(f"npu option must be a dict, but got: {option!r}")
    for name, value in option.items():
        if name in VALUES and str(value) not in VALUES[name]:
            raise ValueError(f"value of {name} should be in {list(VALUES[name])} but got {value}")
    if option.get("MM_BMM_ND_ENABLE") in ("enable", "disable"):
        set_mm_bmm_format_nd(option["MM_BMM_ND_ENABLE"] == "enable")
    _options.update({name: str(value) for name, value in option.items()})


def set_compile_mode(jit_compile: bool = False) -> None:
    set_option({"jitCompile": "enable" if jit_compile else "disable"})


def is_jit_compile_false() -> bool:
    return _options.get("jitCompile", "disable") == "disable"


def set_mm_bmm_format_nd(is_nd: bool = True) -> None:
    global _nd_matmul
    _nd_matmul = bool(is_nd)


def get_mm_bmm_format_nd() -> bool:
    return _nd_matmul


def use_compatible_impl(is_enable: bool) -> None:
    set_option({"TORCH_NPU_USE_COMPATIBLE_IMPL": "1" if is_enable else "0"})


def are_compatible_impl_enabled() -> bool:
    return _options.get("TORCH_NPU_USE_COMPATIBLE_IMPL") == "1"


def set_task_queue_enable(mode: int | str) -> None:
    """Set the level of the task queue, after all work is done; there is none here, so that nothing else changes."""
    global _task_queue
    if int(mode) not in (0, 1, 2):
        raise RuntimeError(f"mode must be 0, 1, or 2, but got {mode}.")
    torch.accelerator.synchronize()
    _task_queue = int(mode)


def get_task_queue_enable() -> int:
    return _task_queue


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Set what a synchronising operation does: here nothing, so that the other modes are refused.

    Raises:
        NotImplementedError: a mode that warns or raises.
        RuntimeError: no mode.
    """
    modes = ("default", "warn", "error")
    mode = modes.index(debug_mode) if debug_mode in modes else debug_mode
    if mode not in (0, 1, 2):
        raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
    if mode:
        asked = f"torch.npu.set_sync_debug_mode({modes[int(mode)]!r})"
        raise NotImplementedError(f"{asked}: the emulated NPU does not watch synchronising operations")


def get_sync_debug_mode() -> int:
    return 0


def set_deterministic_level(level: int) -> None:
    """Choose deterministic operators (1 and above) as `torch.use_deterministic_algorithms` does."""
    torch.use_deterministic_algorithms(level >= 1)


class _DeterministicFrom(torch.autograd.Function):
    """From here on in the forward pass, and up to here in the backward pass, algorithms are deterministic, or not."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, deterministic: bool) -> torch.Tensor:
        ctx.deterministic = deterministic
        torch.use_deterministic_algorithms(deterministic)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.use_deterministic_algorithms(not ctx.deterministic)
        return gradients[0], None


def enable_deterministic_with_backward(tensor: torch.Tensor) -> torch.Tensor:
    return _DeterministicFrom.apply(tensor, True)


def disable_deterministic_with_backward(tensor: torch.Tensor) -> torch.Tensor:
    return _DeterministicFrom.apply(tensor, False)


class CubeMathType(IntEnum):
    KEEP_DTYPE = 0
    ALLOW_FP32_DOWN_PRECISION = 1
    USE_FP16 = 2
    USE_HF32 = 3
    USE_FP32_ADD = 4


class _Config:
    """`torch.npu.config.allow_internal_format`: whether tensors may be laid out in a format of the card."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "allow_internal_format":
            set_option({"ALLOW_INTERNAL_FORMAT": "enable" if value else "disable"})


class _Precision:
    """`torch.npu.matmul` and `torch.npu.conv`: whether products of float32 may be rounded."""

    def __init__(self, option: str, default: bool) -> None:
        self.__dict__.update(option=option, default=default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "allow_hf32":
            if not isinstance(value, bool):
                raise TypeError(f"allow_hf32 must be a bool, but got {type(value).__name__}")
            set_option({self.option: "enable" if value else "disable"})
        elif name == "cube_math_type" and self.option == "ALLOW_MATMUL_HF32":
            if not isinstance(value, CubeMathType):
                raise TypeError(f"value should be one of Enum CubeMathType, but got {type(value)}")
            set_option({"CUBE_MATH_TYPE": value.value})

    def __getattr__(self, name: str) -> Any:
        if name == "allow_hf32":
            return _options[self.option] == "enable" if self.option in _options else self.default
        if name == "cube_math_type" and "CUBE_MATH_TYPE" in _options:
            return CubeMathType(int(_options["CUBE_MATH_TYPE"]))
        return None


config = _Config()
matmul = _Precision("ALLOW_MATMUL_HF32", default=False)
conv = _Precision("ALLOW_CONV_HF32", default=True)
