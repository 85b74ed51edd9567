"""Copies large arrays on several threads: one thread does not saturate the memory bus."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

MIN_BYTES_PER_THREAD = 1 << 21
"""Fewer bytes are not worth waking a thread for"""
MAX_THREADS = 4


def copy_all(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy each pair (target, source) of uint8 arrays, which have equal lengths and do not overlap."""
    total = sum(target.nbytes for target, _ in pairs)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), total // MIN_BYTES_PER_THREAD)
    if threads < 2:
        _copy(pairs)
        return
    first, *others = _shares(pairs, -(-total // threads))
    running = [_pool().submit(_copy, share) for share in others]
    _copy(first)
    for future in running:
        future.result()


def _shares(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], max_bytes: int
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Split the copies into shares of `max_bytes` each."""
    shares: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]
    room = max_bytes
    for target, source in pairs:
        at = 0
        while at < len(target):
            if not room:
                shares.append([])
                room = max_bytes
            size = min(room, len(target) - at)
            shares[-1].append((target[at : at + size], source[at : at + size]))
            at, room = at + size, room - size
    return shares


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="copy")
