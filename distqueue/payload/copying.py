"""Copies of many bytes, on as many threads as pay off: one thread does not fill a memory bus."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

ALONE_BYTES = 1 << 21
"""What a thread is worth waking for"""

MOST_THREADS = 4


def copy_all(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies each (target, source), uint8 arrays of equal length that do not overlap."""
    total = sum(target.nbytes for target, _ in pairs)
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), total // ALONE_BYTES)
    if threads < 2:
        _copy(pairs)
        return
    first, *others = _shares(pairs, -(-total // threads))
    running = [_pool().submit(_copy, share) for share in others]
    _copy(first)
    for future in running:
        future.result()


def _shares(pairs: Sequence[tuple[np.ndarray, np.ndarray]], most: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """The same copies in shares of `most` bytes, cut where they are full."""
    shares: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]
    room = most
    for target, source in pairs:
        at = 0
        while at < len(target):
            if not room:
                shares.append([])
                room = most
            size = min(room, len(target) - at)
            shares[-1].append((target[at : at + size], source[at : at + size]))
            at, room = at + size, room - size
    return shares


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="copy")
