"""Find the operators of a kind of card by name."""

from functools import cache
from importlib import import_module

from fusion.npu.config import lacking, table_of
from fusion.npu.operators.limits import CUDA_PAGE
from fusion.npu.operators.plain import Plain

TABLES = {
    "plain": "plain:Plain",
    "cpu": "cpu:Cpu",
    "ascend": "ascend:Ascend",
    "cuda": "cuda:Cuda",
    "cuda_fused": "cuda_fused:CudaFused",
}
"""Name → module of this package and class"""
BLOCK_TOKENS = {"ascend": 128, "cuda": CUDA_PAGE, "cuda_fused": CUDA_PAGE}
"""Name of a table → number of tokens of which a KV block should have a multiple on a real card"""


def block_tokens(kind: str, name: str = "auto") -> int:
    """Return the number of tokens of which a KV block has a multiple on a device with this table."""
    return 1 if kind == "emulated" else BLOCK_TOKENS.get(table_of(kind, name), 1)


@cache
def operators_of(kind: str, name: str = "auto") -> Plain:
    """Return the table ``name`` for a device of ``kind``; ``auto``: the fastest that it has.
    Raise ValueError: the environment lacks what the table needs."""
    table = table_of(kind, name)
    if kind == "cuda" and (lack := lacking(table)):
        raise ValueError(f"device.operators={table}: {lack}; expected auto, or {table_of(kind)} as auto selects")
    module, class_ = TABLES[table].split(":")
    return getattr(import_module(f"fusion.npu.operators.{module}"), class_)()
