"""Find the operators of a kind of card by name."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version

from fusion.npu.operators.limits import CUDA_PAGE
from fusion.npu.operators.plain import Plain

TABLES = {"plain": "plain:Plain", "cpu": "cpu:Cpu", "ascend": "ascend:Ascend", "cuda": "cuda:Cuda"}
"""Name → module of this package and class"""
OF_KIND = {"emulated": "cpu", "ledger": "cpu", "npu": "ascend", "cuda": "cuda"}
"""Kind of `Device` → name of its table; others have the plain one"""
CUDA_TORCH = (2, 13)
"""The first version of torch that has all operators of CUDA's table; older ones run the plain table"""
BLOCK_TOKENS = {"ascend": 128, "cuda": CUDA_PAGE}
"""Name of a table → number of tokens of which a KV block should have a multiple on a real card"""


def block_tokens(kind: str, name: str = "auto") -> int:
    """Return the number of tokens of which a KV block has a multiple on a device with this table."""
    return 1 if kind == "emulated" else BLOCK_TOKENS.get(name_of(kind, name), 1)


def name_of(kind: str, name: str = "auto") -> str:
    """Return the name of the table that `operators_of` returns."""
    if name != "auto":
        return name
    has_fused = tuple(int(part) for part in version("torch").split(".")[:2]) >= CUDA_TORCH
    return "plain" if kind == "cuda" and not has_fused else OF_KIND.get(kind, "plain")


@cache
def operators_of(kind: str, name: str = "auto") -> Plain:
    """Return the table ``name`` for a device of ``kind``; ``auto``: the fastest that it has."""
    module, class_ = TABLES[name_of(kind, name)].split(":")
    return getattr(import_module(f"fusion.npu.operators.{module}"), class_)()
