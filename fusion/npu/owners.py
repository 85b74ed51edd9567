"""Who owns which storage, by weak references: for devices whose allocator cannot be asked.

A dispatch mode sees every operation inside `owner()`; a storage that comes out and did not go in was made there.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PRUNE_EVERY = 1024


class StorageOwners:
    """Owner by storage. Entries whose storage is gone count nothing and are dropped now and then."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[StorageWeakRef, str]] = {}
        self._lock = threading.Lock()
        self._until_prune = PRUNE_EVERY

    def assign(self, storage: torch.UntypedStorage, owner: str) -> None:
        with self._lock:
            # The weak reference keeps the address from being used again while the entry stands.
            self._owners[storage._cdata] = (StorageWeakRef(storage), owner)
            self._until_prune -= 1
            if self._until_prune <= 0:
                self._owners = {key: entry for key, entry in self._owners.items() if not entry[0].expired()}
                self._until_prune = max(PRUNE_EVERY, len(self._owners))

    def bytes_by_owner(self) -> dict[str, int]:
        """Bytes of the storages that still live, as large as they are now."""
        sizes: dict[str, int] = {}
        with self._lock:
            for reference, owner in self._owners.values():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is not None:
                    sizes[owner] = sizes.get(owner, 0) + storage.nbytes()
        sizes.pop("activations", None)
        return sizes


def storages_of(values: Any, device: torch.device) -> dict[int, torch.UntypedStorage]:
    """The storages on `device` of all tensors in nested arguments or results."""
    return {
        storage._cdata: storage
        for value in tree_iter(values)
        if isinstance(value, torch.Tensor) and value.device == device and value.layout == torch.strided
        for storage in (value.untyped_storage(),)
    }


class OwnerMode(TorchDispatchMode):
    """Inside, new storages on `device` belong to `owner`. Nested scopes all see an operation, the outermost first, so
    that the innermost has the last word."""

    def __init__(self, owners: StorageOwners, owner: str, device: torch.device) -> None:
        super().__init__()
        self.owners = owners
        self.owner = owner
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = storages_of(result, self.device)
        if made:
            known = storages_of((args, kwargs), self.device)
            for key, storage in made.items():
                if key not in known:
                    self.owners.assign(storage, self.owner)
        return result
