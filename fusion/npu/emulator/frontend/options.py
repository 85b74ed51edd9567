"""`torch.npu`: options of the compiler, of precision and of layouts.

They permit the real card to compile, to round or to lay out tensors in other ways. The emulated one keeps to the plain
ways, which every option permits: an option is checked, stored and reported.
"""

from __future__ import annotations

from typing import Any

VALUES: dict[str, tuple[str, ...]] = {
    "ACL_PRECISION_MODE": ("allow_fp32_to_fp16", "must_keep_origin_dtype"),
    "ACL_OP_SELECT_IMPL_MODE": ("high_performance", "high_precision"),
    "ACL_AICORE_NUM": tuple(map(str, range(1, 33))),
    "ACL_OP_DEBUG_LEVEL": ("0", "1", "2", "3", "4"),
    "ACL_OP_COMPILER_CACHE_MODE": ("disable", "enable", "force"),
}
"""Accepted values of the options that torch_npu checks."""

_options: dict[str, str] = {}


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
    _options.update({name: str(value) for name, value in option.items()})


def set_compile_mode(jit_compile: bool = False) -> None:
    set_option({"jitCompile": "enable" if jit_compile else "disable"})


def is_jit_compile_false() -> bool:
    return _options.get("jitCompile", "disable") == "disable"


def set_mm_bmm_format_nd(is_nd: bool = True) -> None:
    set_option({"MM_BMM_ND_ENABLE": "enable" if is_nd else "disable"})


def get_mm_bmm_format_nd() -> bool:
    return _options.get("MM_BMM_ND_ENABLE") != "disable"


class _Switches:
    """Attributes that are options, such as `torch.npu.conv.allow_hf32`: whether products of float32 may be rounded."""

    def __init__(self, **options: tuple[str, bool]) -> None:
        self.__dict__["_by_name"] = options  # option and default by attribute

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, but got {type(value).__name__}")
        set_option({self._by_name[name][0]: "enable" if value else "disable"})

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__["_by_name"]:
            raise AttributeError(f"torch.npu: no option {name!r} on the emulated NPU")
        option, default = self.__dict__["_by_name"][name]
        return _options[option] == "enable" if option in _options else default


config = _Switches(allow_internal_format=("ALLOW_INTERNAL_FORMAT", False))
matmul = _Switches(allow_hf32=("ALLOW_MATMUL_HF32", False))
conv = _Switches(allow_hf32=("ALLOW_CONV_HF32", True))
