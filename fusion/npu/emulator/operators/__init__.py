"""Offer operators of `torch.ops.npu` on the emulated NPU: those that `fusion/npu/operators/ascend*.py` call.

    schemas/torch_npu-VERSION.txt ──► library "npu" ◄── references.py   what each computes, in float32, rounded once
                                           ▲
                                      gradients.py   which operator computes the gradient, as torch_npu's autograd says

The schemas are the wheels' own, one a line (`tests/npu/contracts` compares them). A reference states the meaning of an
operator, for the arguments that are used here; other arguments raise. It is no model of a card's rounding, order of
addition, speed or workspace. Where torch_npu is loaded, nothing is registered."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fusion.npu.emulator.operators import attention_references, dispatch_references, references
from fusion.npu.emulator.operators.gradients import GRADIENTS

REFERENCES: dict[str, Callable[..., Any]] = {
    name: function
    for module in (references, attention_references, dispatch_references)
    for name, function in vars(module).items()
    if name.startswith("npu_")
}
"""Operator, without its overload → what it computes"""
SCHEMAS = Path(__file__).parents[1] / "schemas"
VERSIONS = tuple(sorted(path.stem.removeprefix("torch_npu-") for path in SCHEMAS.glob("torch_npu-*.txt")))
"""Versions of torch_npu whose schemas are recorded; the first is emulated, of the others only what differs from it."""


def recorded_schemas(version: str) -> dict[str, str]:
    """Return the schemas of a version of torch_npu, by the operator's name (with its overload): those recorded of the
    first version, and in place of these what is recorded of this one."""
    texts = [(SCHEMAS / f"torch_npu-{one}.txt").read_text() for one in (VERSIONS[0], version)]
    return {line.partition("(")[0]: line for text in texts for line in text.splitlines()}


@cache
def register() -> torch.library.Library:
    """Define the operators in this process, once, for tensors of any device: the emulated NPU's, the host's and `meta`.
    Raise RuntimeError: an operator is defined already, as by torch_npu."""
    library = torch.library.Library("npu", "FRAGMENT")
    for name, schema in recorded_schemas(VERSIONS[0]).items():
        library.define(schema)
        library.impl(name, REFERENCES[name.partition(".")[0]], "CompositeExplicitAutograd")
    register_gradients(library)
    return library


def register_gradients(library: torch.library.Library) -> None:
    """Register the gradient of every operator that torch_npu derives. The others listed refuse tensors that require
    one."""
    for name, gradient in GRADIENTS.items():
        if gradient is None:
            library.impl(name, _refuse_gradient(name), "Autograd", with_keyset=True)
        else:
            torch.library.register_autograd(f"npu::{name}", gradient.compute, setup_context=gradient.keep, lib=library)


def _refuse_gradient(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.npu, name).default

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise NotImplementedError(f"torch_npu derives no gradient of {name}")
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return call
