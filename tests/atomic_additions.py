"""Find the operations whose result depends on the order in which a card adds."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BY_INDEX = {"index_add", "scatter_add", "scatter_reduce", "scatter", "index_reduce"}
PUTS = {"index_put", "_index_put_impl", "_unsafe_index_put", "put"}
ORDERLESS = {"amin", "amax"}


class AtomicAdditions(TorchDispatchMode):
    """Collects the operations on the emulated card that add floats at indices of which some repeat: a real card does so
    by atomics, in an order that differs between runs. Sums of whole numbers are exact in any order; a cumulative sum of
    one row is found, too, which CUDA scans in an order that differs. ``seen``: all operations by index that add."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation.name().split("::")[1].split(".")[0].removesuffix("_")
        if any(one.device.type == "npu" for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)):
            added = _added(name, args, kwargs)
            if added is not None:
                self.seen.append(name)
                index, values = added
                if values.is_floating_point() and _repeats(index) and not _are_whole(values):
                    self.found.append(f"{name} in {_caller()}")
        return operation(*args, **kwargs)


def _caller() -> str:
    frames = [one for one in traceback.extract_stack() if "/fusion/" in one.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "a backward pass"


def _added(name: str, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return places, of which equal ones name the same element, and the values that are added there; None: nothing is
    added."""
    if name in BY_INDEX:
        x, dim, index, values, *more = args
        how = more[0] if more else kwargs.get("reduce", "sum" if name.endswith("add") else None)
        if how is None or how in ORDERLESS:
            return None
        if name in ("index_add", "index_reduce"):
            return index.cpu(), values.cpu()
        places = torch.arange(x.numel()).view(x.shape)  # of each element, from which those that are added to are taken
        index = index.cpu()
        region = places[tuple(slice(size) if d != dim % x.dim() else slice(None) for d, size in enumerate(index.shape))]
        return region.gather(dim, index), torch.as_tensor(values).cpu()
    if name in PUTS:
        if name == "put":
            x, index, values, *more = args
            indices: list[Any] = [index]
        else:
            x, indices, values, *more = args
        if not (more[0] if more else kwargs.get("accumulate", False)):
            return None
        places = torch.arange(x.numel()) if name == "put" else torch.arange(x.numel()).view(x.shape)
        return places[tuple(slice(None) if one is None else one.cpu() for one in indices)], values.cpu()
    if name == "bincount" and len(args) > 1 and args[1] is not None:
        return args[0].cpu(), args[1].cpu()
    if name == "cumsum" and args[0].numel() == args[0].shape[args[1]]:
        return torch.zeros(2), args[0].cpu()
    return None


def _repeats(index: torch.Tensor) -> bool:
    return len(index.flatten().unique()) < index.numel()


def _are_whole(values: torch.Tensor) -> bool:
    return bool((values == values.round()).all()) and float(values.abs().sum()) < 2**24
