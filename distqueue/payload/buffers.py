"""Memory of a reader's own, kept warm: what a batch lay in serves a later one once nothing looks at it any more.

Fresh memory costs a page fault every 4 KB, more than the copy into it. So the buffers of batches that were let go are
kept, up to what the two largest batches of late needed, and handed out again.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

KEPT = 2
"""Buffers kept, each at most as large as the largest of the last few batches"""

SMALLEST = 1 << 16
"""Below this many bytes memory comes from numpy"""


class WarmBuffers:
    """Thread-safe. `take(nbytes)` is a writable uint8 tensor, aligned to 64; its memory comes back by itself once no
    tensor or array looks at it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []
        self._wanted: deque[int] = deque(maxlen=8)

    def take(self, nbytes: int) -> Tensor:
        if nbytes < SMALLEST:
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            self._wanted.append(nbytes)
            fitting = [buffer for buffer in self._free if nbytes <= buffer.size <= 2 * _room(nbytes)]
            buffer = min(fitting, key=lambda buffer: buffer.size, default=None)
            if buffer is not None:
                self._free = [other for other in self._free if other is not buffer]
        if buffer is None:
            buffer = _map(_room(nbytes))
        lent = buffer[:nbytes]  # an object of this loan's own, held by the storage of the tensors, and by nothing else
        weakref.finalize(lent, self._give_back, buffer).atexit = False
        return torch.from_numpy(lent)

    def _give_back(self, buffer: np.ndarray) -> None:
        with self._lock:
            self._free.append(buffer)
            most = 2 * _room(max(self._wanted, default=0))
            self._free = [kept for kept in self._free if kept.size <= most][-KEPT:]


def _room(nbytes: int) -> int:
    """A little more than asked, so that batches of about one size share buffers, in huge pages."""
    nbytes += nbytes // 8
    return nbytes + -nbytes % (1 << 21)


def _map(nbytes: int) -> np.ndarray:
    """Anonymous memory, in huge pages where the system gives them."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
