"""Find the operations for which the host waits for a card."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HostReads(TorchDispatchMode):
    """Collects the operations that make the host wait for a card: copies from it, and results sized by its data; and
    ``sent``: copies to it for which the host waits, too."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.sent = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name = operation.name().split("::")[1].split(".")[0]
        leaves_card = "npu" in _places(args) and "cpu" in _places(result)
        if leaves_card or name in ("_local_scalar_dense", "bincount", "nonzero"):
            self.found.append(name)
        if "cpu" in _places(args) and "npu" in _places(result) and not (kwargs or {}).get("non_blocking"):
            self.sent.append(name)
        return result


def _places(tree):
    return {one.device.type for one in tree_leaves(tree) if isinstance(one, torch.Tensor)}
