"""Find the operators of a kind of card by name."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from fusion.npu.operators.plain import Plain

TABLES = {"plain": "plain:Plain", "cpu": "cpu:Cpu", "ascend": "ascend:Ascend"}
"""Name → module of this package and class"""
OF_KIND = {"emulated": "cpu", "ledger": "cpu", "npu": "ascend"}
"""Kind of `Device` → name of its table; others have the plain one"""


@cache
def operators_of(kind: str, name: str = "auto") -> Plain:
    """Return the table ``name`` for a device of ``kind``; ``auto``: the fastest that it has."""
    module, class_ = TABLES[OF_KIND.get(kind, "plain") if name == "auto" else name].split(":")
    return getattr(import_module(f"fusion.npu.operators.{module}"), class_)()
