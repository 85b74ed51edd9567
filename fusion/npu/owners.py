"""Track the owner of every storage by weak references, for devices whose allocator does not store it.

A dispatch mode intercepts every operation inside `owner()`; an output storage that is not an input was allocated there.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PRUNE_EVERY = 1024


class StorageOwners:
    """Map storages to owners. Entries of freed storages count nothing and are pruned periodically."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[StorageWeakRef, str]] = {}
        self._lock = threading.Lock()
        self._until_prune = PRUNE_EVERY

    def assign(self, storage: torch.UntypedStorage, owner: str) -> None:
        with self._lock:
            # The weak reference prevents reuse of the address while the entry exists.
            self._owners[storage._cdata] = (StorageWeakRef(storage), owner)
            self._until_prune -= 1
            if self._until_prune <= 0:
                self._owners = {key: entry for key, entry in self._owners.items() if not entry[0].expired()}
                self._until_prune = max(PRUNE_EVERY, len(self._owners))

    def bytes_by_owner(self) -> dict[str, int]:
        """Return the current bytes of the live storages by owner."""
        sizes: dict[str, int] = {}
        with self._lock:
            for reference, owner in self._owners.values():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is not None:
                    sizes[owner] = sizes.get(owner, 0) + storage.nbytes()
        sizes.pop("activations", None)
        return sizes


def storages_of(values: Any, device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Return the storages on `device` of all tensors in nested arguments or results."""
    return {
        storage._cdata: storage
        for value in tree_iter(values)
        if isinstance(value, torch.Tensor) and value.device == device and value.layout == torch.strided
        for storage in (value.untyped_storage(),)
    }


class NewStorages(TorchDispatchMode):
    """Call ``note`` with every new storage on ``device`` that an operation returns. Nested scopes all intercept an
    operation, the outermost first, so that the innermost one has the last word."""

    def __init__(self, device: torch.device, note: Callable[[torch.UntypedStorage], None]) -> None:
        super().__init__()
        self.device, self.note = device, note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = storages_of(result, self.device)
        if outputs:
            inputs = storages_of((args, kwargs), self.device)
            for key, storage in outputs.items():
                if key not in inputs:
                    self.note(storage)
        return result
