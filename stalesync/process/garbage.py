"""Let Python collect garbage seldom in the controller, and let the threads of a process share memory.

A step creates objects for every sample, which live until the step ends. With Python's defaults a collection begins
after every 700 of them, and the larger ones visit all objects of the process, imported modules included: a third of the
controller's time in a step with 16,384 groups.

glibc gives each thread that starts an arena of its own, up to eight a core, and what is freed in one is not used by
others: with every checkpoint that another thread writes, a process would grow."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NEW_OBJECTS = 50_000
"""Number of new objects after which a collection begins, at least"""
OBJECTS_PER_SAMPLE = 6
"""More than the objects that refer to others which are held for a sample in progress. So those of a step end before a
collection visits them, and what is garbage is never more than the samples in progress."""
NUM_COLLECTIVES = 100
"""Number of collectives of which torch keeps a record"""
ARENAS = 2
"""Number of arenas from which all threads of a process allocate"""
M_ARENA_MAX = -8
"""Constant of mallopt(3)"""


def share_arenas() -> None:
    """Bound the arenas of this process; Ray's processes have the variable MALLOC_ARENA_MAX. Another C library than
    glibc is left as it is."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def keep_few_collectives() -> None:
    """Let torch keep the last NUM_COLLECTIVES collectives of this process, with their stacks, for the analysis of a
    hang; its default of 2,000 takes some MB that fill during the first thousand steps. Called before torch has a
    process group; keeps the user's setting."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(NUM_COLLECTIVES))


@contextmanager
def collecting_seldom(num_samples: int) -> Iterator[None]:
    """Exclude all objects that exist at the start of the block from collections inside it, and let these begin seldom.
    Where objects were excluded before, all stay excluded: Python includes all of them again, or none. ``num_samples``:
    maximum number of samples in progress."""
    thresholds, excluded_before = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(NEW_OBJECTS, OBJECTS_PER_SAMPLE * num_samples))
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not excluded_before:
            gc.unfreeze()
