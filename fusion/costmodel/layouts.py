"""Parses and formats layouts as text (`tp8pp8ep32`), and checks them against a model's shape."""

from __future__ import annotations

import re

from fusion.costmodel.shape import Shape
from fusion.model import Parallel

FORM = "sizes of tp, pp, ep and etp written together, like tp8pp8ep32 (those left out are 1), or auto"


def parse_layout(key: str, text: str, *, world: int, shape: Shape) -> Parallel:
    """Parses a layout over ``world`` dies; the remaining ones are data parallel. ``key``: `train` or `infer`.

    Raises:
        ValueError: not of the form, or sizes that do not divide the dies or the model; names the key.
    """
    if not re.fullmatch(r"((tp|pp|ep|etp)\d+)+", text):
        raise ValueError(f"{key}={text!r}: expected {FORM}")
    sizes = re.findall(r"(etp|tp|pp|ep)(\d+)", text)
    axes = [axis for axis, _ in sizes]
    if len(set(axes)) < len(axes):
        raise ValueError(f"{key}={text!r} states {max(axes, key=axes.count)} twice: expected {FORM}")
    try:
        parallel = Parallel(world, **{axis: int(size) for axis, size in sizes})
    except ValueError as error:
        raise ValueError(f"{key}={text!r}: {error}") from None
    problem = misfit(parallel, shape)
    if problem:
        raise ValueError(f"{key}={text!r}: {problem}")
    return parallel


def layout_text(parallel: Parallel) -> str:
    """Formats a layout as `parse_layout` reads it."""
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "ep": parallel.ep, "etp": parallel.etp}
    return "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1 or axis in ("tp", "ep"))


def misfit(parallel: Parallel, shape: Shape) -> str | None:
    """Returns the reason why a layout cannot shard a model, with both numbers; None if it can."""
    for name, size in (("attention heads", shape.heads), ("vocabulary", shape.vocab_size)):
        if size % parallel.tp:
            return f"tp={parallel.tp} does not divide the model's {size} {name}"
    narrow = [t.shape[t.dim] for layer in shape.kinds for t in layer.tensors if t.cut == "tp"]
    if any(size % parallel.tp for size in narrow):
        return f"tp={parallel.tp} does not divide a width of {next(s for s in narrow if s % parallel.tp)}"
    kv = shape.kv_heads
    if kv and kv % parallel.tp and parallel.tp % kv:
        return f"tp={parallel.tp} neither divides nor is a multiple of the model's {kv} key/value heads"
    if parallel.ep * parallel.etp > 1 and not shape.experts:
        return "ep and etp need experts, but the model is dense"
    if shape.experts % parallel.ep:
        return f"ep={parallel.ep} does not divide the model's {shape.experts} experts"
    if shape.experts and shape.expert_width % parallel.etp:
        return f"etp={parallel.etp} does not divide the experts' width of {shape.expert_width}"
    if parallel.pp > len(shape.layers):
        return f"pp={parallel.pp} exceeds the model's {len(shape.layers)} layers"
    return None
