"""Parse and format layouts as text (`tp8pp8ep32`)."""

import re

from fusion.costmodel.shape import Shape
from fusion.model import Parallel

AXES = ("tp", "pp", "ep", "etp", "cp", "dcp")
OF_SIDE = {"cp": "train", "dcp": "infer"}
"""Axis that one side alone has → the side"""
FORM = (
    "sizes of tp, pp, ep and etp, of train also cp, of infer also dcp, written together, like tp8pp8ep32 (those left "
    "out are 1), or auto"
)


def parse_layout(key: str, text: str, *, world: int, shape: Shape) -> Parallel:
    """Parse a layout over ``world`` dies; the remaining ones are data parallel. ``key``: `train` or `infer`.
    Raise ValueError: not of the form, or sizes that do not divide the dies or the model; names the key."""
    if not re.fullmatch(r"((tp|pp|ep|etp|cp|dcp)\d+)+", text):
        raise ValueError(f"{key}={text!r}: expected {FORM}")
    sizes = [(axis, int(size)) for axis, size in re.findall(r"(etp|tp|pp|ep|dcp|cp)(\d+)", text)]
    axes = [axis for axis, _ in sizes]
    if len(set(axes)) < len(axes):
        raise ValueError(f"{key}={text!r} states {max(axes, key=axes.count)} twice: expected {FORM}")
    for axis, side in OF_SIDE.items():
        if key != side and dict(sizes).get(axis, 1) > 1:
            raise ValueError(f"{key}={text!r}: expected {axis}=1, as only {side} has it")
    try:
        parallel = Parallel(world, **dict(sizes))
    except ValueError as error:
        raise ValueError(f"{key}={text!r}: {error}") from None
    if problem := parallel.misfit(shape.config):
        raise ValueError(f"{key}={text!r}: {problem}")
    return parallel


def layout_text(parallel: Parallel) -> str:
    """Format a layout as `parse_layout` reads it."""
    sizes = ((axis, getattr(parallel, axis)) for axis in AXES)
    return "".join(f"{axis}{size}" for axis, size in sizes if size > 1 or axis in ("tp", "ep"))
