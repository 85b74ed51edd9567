"""Compare PyTorch's operators on the emulated card with the CPU's, on PyTorch's own samples: values and gradients.

    python -m tests.npu.opinfo_sweep SHARE SHARES FIRST

Writes one line of JSON before and one after each operator of the share, from number FIRST on: an operator that kills
the process has only the first.
"""

from __future__ import annotations

import json
import sys
import unittest
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from fusion.npu import open_device

# PyTorch's list imports its test cases, and these a package of which only a base class is needed.
sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
MAX_SAMPLES = 12
"""Maximum number of samples of an operator and dtype"""
REFUSAL = "supports only strided tensors"
"""What the emulator says of sparse and quantised tensors"""
UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operators whose results have no defined values"""


@dataclass
class Comparison:
    """What an operator's samples have shown. ``refused``: samples with tensors that the emulator refuses by name."""

    runs: int = 0
    gradients: int = 0
    refused: int = 0
    differences: list[str] = field(default_factory=list)


def main(share: int, shares: int, first: int) -> None:
    open_device("emulated")
    for number, op in list(enumerate(op_db))[share::shares]:
        if number >= first:
            name = op.formatted_name
            print(json.dumps({"number": number, "op": name}), flush=True)
            print(json.dumps({"number": number, "op": name} | vars(compare(op))), flush=True)


def compare(op: Any) -> Comparison:
    """Runs an operator's samples on both devices."""
    seen = Comparison()
    for dtype in DTYPES:
        if not op.supports_dtype(dtype, "cpu"):
            continue
        differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        torch.manual_seed(0)
        for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), MAX_SAMPLES):
            try:
                compare_sample(op, sample, seen)
            except AssertionError as error:
                seen.differences.append(f"{dtype}: {sample.summary()}: {str(error).splitlines()[:3]}"[:600])
    return seen


def compare_sample(op: Any, sample: Any, seen: Comparison) -> None:
    want, got = run(op, sample, "cpu"), run(op, sample, "npu")
    if isinstance(got, NotImplementedError) and REFUSAL in str(got):
        seen.refused += 1
        return
    failed = isinstance(want, Exception), isinstance(got, Exception)
    if all(failed):
        return
    assert not any(failed), f"the CPU: {want!r:.200}; the card: {got!r:.200}"
    (values, gradients), (card_values, card_gradients) = want, got
    seen.runs += 1
    assert_alike(card_values, values, defined=op.name not in UNWRITTEN)
    if gradients:
        seen.gradients += 1
        assert_alike(card_gradients, gradients)


def run(op: Any, sample: Any, device: str) -> tuple[list[Any], list[Any]] | Exception:
    """Returns the results and the gradients of the inputs; the error, if there is one."""
    leaves: list[torch.Tensor] = []

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            moved = value.detach().clone().to(device).requires_grad_(value.requires_grad)
            leaves.append(moved)
            return moved
        return torch.device(device) if isinstance(value, torch.device) or value == "cpu" else value

    try:
        arguments, options = tree_map(move, ([sample.input, *sample.args], dict(sample.kwargs)))
        torch.manual_seed(0)
        result = op(*arguments, **options)
        differentiated = sample.output_process_fn_grad(result)
        outputs = [one for one in tree_flatten(differentiated)[0] if is_differentiable(one)]
        if outputs:
            torch.manual_seed(1)
            weights = [torch.randn(one.shape, dtype=one.dtype, device="cpu").to(device) for one in outputs]
            torch.autograd.backward(outputs, weights)
    except Exception as error:
        return error
    values = [one.detach() if isinstance(one, torch.Tensor) else one for one in tree_flatten(result)[0]]
    return values, [leaf.grad for leaf in leaves if leaf.requires_grad] if outputs else []


def is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.layout == torch.strided


def assert_alike(got: list[Any], want: list[Any], defined: bool = True) -> None:
    """Asserts that results are on the card and bitwise the CPU's. ``defined``: they have defined values."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs or str(ours).replace("npu:0", "cpu") == str(theirs), f"{ours} is not {theirs}"
            continue
        assert ours.device.type == "npu", f"a result on {ours.device}"
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        if defined:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
