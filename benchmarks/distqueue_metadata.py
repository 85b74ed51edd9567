"""Measure the cost of the queue's metadata with a million live rows: adding columns, selecting samples, and memory.

    python benchmarks/distqueue_metadata.py [--rows 1000000] [--json metadata.json]

Samples in groups of 8 receive 16 ragged columns, 4 per put, 4,096 samples per put; the last columns arrive in random
order, as stages finish. 512 waiting requests of four kinds are checked after every call, as the queue does. Times are
medians over many calls; the floor of each is encoding and hashing the ids once (update) or decoding them once (get),
and one access in random order to the bytes of the rows. Memory is the growth of the process; its floor is the bytes of
the ids and numbers that were put.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np

# Must precede this folder, where distqueue.py has the package's name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distqueue.samples import SampleTable, Selection  # noqa: E402

ROWS, BATCH, GROUP_SIZE, TASKS, COLUMNS = 1_000_000, 4096, 8, ("reward", "train"), 16
WAITING, UPDATES, GETS = 512, 200, 40
NAMES = tuple(f"column{c}" for c in range(COLUMNS))
PART_BYTES, TOKENS_BYTES = 4, 4


def ids_of(rows: np.ndarray) -> list[str]:
    """Return an id of 36 characters, the length of a UUID, for each row."""
    return [f"{row * 2654435761 % 2**32:08x}-0000-4000-8000-{row:012x}" for row in rows.tolist()]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Load:
    """Fills a table with ``rows`` samples that lack only their last columns; each put adds ``per_put`` columns."""

    def __init__(self, rows: int, per_put: int) -> None:
        self.rng = np.random.default_rng(0)
        self.table = SampleTable(TASKS, lease_s=900.0, group_size=GROUP_SIZE)
        self.rows, self.per_put, self.segment = rows, per_put, 0
        steps = range(0, COLUMNS, per_put)
        for first in steps[:-1]:
            for start in range(0, rows, BATCH):
                self.put(np.arange(start, min(start + BATCH, rows)), first, new=first == 0)
        self.last_first, self.order = steps[-1], self.rng.permutation(rows)

    def put(self, rows: np.ndarray, first: int, new: bool = False) -> float:
        """Put columns first to first + per_put of these rows; return the seconds."""
        ids = ids_of(rows)
        groups = [f"prompt-{row // GROUP_SIZE:09d}" for row in rows.tolist()] if new else ()
        versions = np.zeros((len(rows), 2), np.int32) if new else None
        columns: dict[str, np.ndarray | None] = {
            name: self.rng.integers(1, 4096, len(rows)) for name in NAMES[first : first + self.per_put]
        }
        self.segment += 1
        start = time.perf_counter()
        self.table.put(ids, columns, segment=self.segment, groups=groups, versions=versions)
        return time.perf_counter() - start

    def finish(self, start: int) -> float:
        """Put the last columns of the next batch of samples, in random order; return the seconds."""
        return self.put(self.order[start : start + BATCH], self.last_first)


def selections() -> list[Selection]:
    """Return 512 requests of four kinds that cannot be served: each needs more samples than there are."""
    kinds = [("reward", NAMES[:1]), ("reward", NAMES[:8]), ("train", NAMES[:12]), ("train", NAMES)]
    return [Selection(*kinds[k % 4], count=2**40, whole_groups=k % 4 == 3) for k in range(WAITING)]


def floors(rows: int) -> dict[str, float]:
    """Return the milliseconds that the ids and the bare bytes of one batch take."""
    rng = np.random.default_rng(1)
    fields = np.zeros((rows, TOKENS_BYTES * COLUMNS // 4 + PART_BYTES), np.uint8)
    slots, ids = rng.permutation(rows)[:BATCH], ids_of(np.arange(BATCH))
    encoded = np.array([id.encode() for id in ids])
    values = np.ones((BATCH, fields.shape[1]), np.uint8)

    def update() -> None:
        for id in ids:
            hash(id.encode())
        fields[slots] = values

    def get() -> None:
        [id.decode() for id in encoded.tolist()]
        fields[slots]

    return {"update_floor_ms": median_ms(update), "get_floor_ms": median_ms(get)}


def median_ms(call: Callable[[], object], times: int = 20) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def measure_times(rows: int = ROWS) -> dict[str, float]:
    load, waiting = Load(rows, per_put=4), selections()
    table = load.table

    def check_waiting() -> float:
        start = time.perf_counter()
        assert not any(table.can_serve(selection) for selection in waiting)
        return time.perf_counter() - start

    check_waiting()
    puts = [load.finish(k * BATCH) + check_waiting() for k in range(min(UPDATES, rows // BATCH))]
    for start in range(len(puts) * BATCH, rows, BATCH):
        load.finish(start)
    times: dict[str, list[float]] = {"get": [], "get_groups": [], "get_budget": [], "ack": []}
    kinds = {
        "get": Selection("train", NAMES, BATCH),
        "get_groups": Selection("train", NAMES, BATCH, whole_groups=True),
        "get_budget": Selection("train", NAMES, token_budget=BATCH * 3800),
    }
    for _ in range(min(GETS, rows // BATCH // 4)):
        for kind, selection in kinds.items():
            start = time.perf_counter()
            taken = table.take(selection, 0.0)
            times[kind].append(time.perf_counter() - start + check_waiting())
            assert taken is not None and len(taken) >= BATCH * 0.9
            start = time.perf_counter()
            table.ack("train", taken.ids)
            times["ack"].append(time.perf_counter() - start)
    return {"update_ms": statistics.median(puts) * 1e3, "update_max_ms": max(puts) * 1e3} | {
        f"{kind}_ms": statistics.median(seconds) * 1e3 for kind, seconds in times.items()
    }


def measure_memory(rows: int = ROWS, per_put: int = 4) -> float:
    """Return the growth of the process in bytes per row, for a table whose samples have all columns."""
    gc.collect()
    before = resident_bytes()
    load = Load(rows, per_put)
    for selection in selections():
        load.table.can_serve(selection)
    for start in range(0, rows, BATCH):
        load.finish(start)
    del load.order
    gc.collect()
    return (resident_bytes() - before) / rows


def measure(rows: int = ROWS) -> dict[str, float]:
    """Return update_ms, get_ms and bytes_per_row with their floors.

    Every part runs in a separate process, so that none reuses memory that another has freed.
    """
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        figures = dict(pool.apply(measure_times, (rows,))) | pool.apply(floors, (rows,))
        figures["bytes_per_row"] = pool.apply(measure_memory, (rows, 4))
        figures["bytes_per_row_16_puts"] = pool.apply(measure_memory, (rows, 1))
    named = len(ids_of(np.arange(1))[0]) + TOKENS_BYTES * COLUMNS
    figures["bytes_per_row_floor"] = named + PART_BYTES * 4
    figures["bytes_per_row_16_puts_floor"] = named + PART_BYTES * 16
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures = measure(args.rows)
    print(f"{args.rows:,} live rows, {COLUMNS} ragged columns, batches of {BATCH:,}")
    for what in ("update", "get"):
        print(f"{what:<22} {figures[f'{what}_ms']:8.2f} ms   floor {figures[f'{what}_floor_ms']:6.2f} ms")
    for what in ("update_max", "get_groups", "get_budget", "ack"):
        print(f"{what:<22} {figures[f'{what}_ms']:8.2f} ms")
    for what in ("bytes_per_row", "bytes_per_row_16_puts"):
        print(f"{what:<22} {figures[what]:8.0f} B    floor {figures[f'{what}_floor']:6.0f} B")
    if args.json:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
