"""A pool of a reader's buffers, whose memory is reused once nothing references it, and the copies that fill them.

Fresh memory costs a page fault every 4 KB, more than the copy into it. So two buffers of released batches are kept,
each of up to twice what the largest of the last batches needed. One thread does not saturate the memory bus: what is
large is copied by several."""

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

ALIGN = 64
"""Bytes of which the positions of arrays in a buffer or a segment are multiples"""

MAX_BUFFERS = 2
"""Buffers kept, each of up to twice what the largest of the last batches needed"""
MIN_POOLED_BYTES = 1 << 16
"""Smaller requests are not served from the pool"""
MIN_BYTES_PER_THREAD = 1 << 21
"""Fewer bytes are not worth waking a thread for"""
PIECE_BYTES = 1 << 19
"""Maximum bytes that a thread copies at a time, so that all of them have as much to do"""
MAX_THREADS = 4


class BufferPool:
    """A pool of buffers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: deque[np.ndarray] = deque(maxlen=MAX_BUFFERS)
        """The last buffers given back. A finalizer appends to it without the lock: a garbage collection can run it in a
        thread that holds the lock"""
        self._wanted: deque[int] = deque(maxlen=8)

    def take(self, nbytes: int) -> np.ndarray:
        """Allocate a writable uint8 array, aligned to 64 bytes, whose memory returns to the pool by itself once no
        array or tensor references it."""
        if nbytes < MIN_POOLED_BYTES:
            memory = np.empty(nbytes + ALIGN, np.uint8)
            start = -memory.__array_interface__["data"][0] % ALIGN
            return memory[start : start + nbytes]
        with self._lock:
            self._wanted.append(nbytes)
            max_bytes = 2 * _room(max(self._wanted))
            free = [self._free.popleft() for _ in range(len(self._free))]
            fitting = [buffer for buffer in free if nbytes <= buffer.size <= 2 * _room(nbytes)]
            buffer = min(fitting, key=lambda buffer: buffer.size, default=None)
            self._free.extend(other for other in free if other is not buffer and other.size <= max_bytes)
        if buffer is None:
            buffer = _map(_room(nbytes))
        # All views of `lent` reference it: numpy lets views of an array reference that array's own base instead, if
        # the base is an array, too; here it is a memoryview.
        lent = np.frombuffer(buffer.data[:nbytes], np.uint8)
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return lent


def _room(nbytes: int) -> int:
    """Round up by an eighth, so that batches of similar size share buffers, and to whole huge pages."""
    nbytes += nbytes // 8
    return nbytes + -nbytes % (1 << 21)


def _map(nbytes: int) -> np.ndarray:
    """Map anonymous memory, in huge pages if the system provides them."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def copy_all(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy each pair (target, source) of uint8 arrays, which have equal lengths and do not overlap."""
    total = sum(target.nbytes for target, _ in pairs)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), total // MIN_BYTES_PER_THREAD)
    if threads < 2:
        _copy(pairs)
        return
    cuts = (
        (target, source, slice(at, at + PIECE_BYTES))
        for target, source in pairs
        for at in range(0, len(target), PIECE_BYTES)
    )
    pieces = [(target[cut], source[cut]) for target, source, cut in cuts]
    running = [_pool().submit(_copy, pieces[first::threads]) for first in range(1, threads)]
    _copy(pieces[::threads])
    for future in running:
        future.result()


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="copy")
