"""Plan the switches of `benchmarks/planning.py`, and count from the rounds what every rank holds and sends."""

from __future__ import annotations

import multiprocessing
import resource
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from benchmarks.harness import ROOT, Figures, resident_bytes
from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.presets import load_shape
from fusion.costmodel.segments import Side
from fusion.costmodel.shape import Shape
from fusion.costmodel.traffic import switch_traffic
from fusion.ep_switch import Layout, Plan, plan_switch
from fusion.model import Parallel

MODEL, HARDWARE = "pangu_718b", "ascend_910c"
BUCKET_BYTES = 512 << 20
"""As in recipes/several_hosts.sh"""


def measure(args: Namespace) -> Figures:
    """Plan both directions, each in a process of its own."""
    figures: Figures = {}
    for direction in ("to_infer", "to_train"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            figures[direction] = process.submit(measure_plan, args.layers, args.ranks, direction).result()
    return figures


def measure_plan(num_layers: int, num_ranks: int, direction: str) -> Figures:
    """Plan one direction; return its cost and what was verified."""
    config = load_shape(MODEL, ROOT / "recipes" / "shapes").shape.config.without_predictors
    config = replace(config, layers=config.layers[:num_layers])
    tp = min(8, num_ranks // 8)
    train = Parallel(num_ranks, tp=tp, ep=tp, pp=min(16, num_ranks // (2 * tp)))
    infer = Parallel(num_ranks, tp=tp, ep=min(256, num_ranks))
    ranks, topology = tuple(range(num_ranks)), hardware_named(HARDWARE).topology
    ends = [Layout(config, grid, ranks, torch.bfloat16, BUCKET_BYTES) for grid in (train, infer)]
    source, target = ends if direction == "to_infer" else ends[::-1]
    before, start = resident_bytes(), time.process_time()
    plan = plan_switch(source, target, BUCKET_BYTES, topology)
    cpu_s, peak_kb = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks, sent, received = count(plan)
    paper = switch_traffic(Shape(MODEL, config), Side(source.parallel), Side(target.parallel), topology)
    return {
        "cpu_s": cpu_s,
        "peak_mb": (peak_kb * 1024 - before) / 1e6,
        "rounds": len(plan.rounds),
        "transfers": sum(len(round_.moves) for round_ in plan.rounds),
        "over_bound": max(peaks[rank] / plan.bound_bytes(rank) for rank in ranks),
        "busiest": sent.max() / paper.sent.sum(0).max(),
        "missing": float(np.abs(received - paper.received.sum(0)).max().round()),
    }


def count(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return by rank the peak of weights and buffers with two rounds in flight, and the bytes sent and received."""
    size, itemsize = max(plan.ranks) + 1, plan.wire_dtype.itemsize
    sizes = [[layout.unit_nbytes(rank) for rank in range(size)] for layout in (plan.source, plan.target)]
    held = np.array([sum(units) for units in sizes[0]])
    wire = np.zeros((2, size), np.int64)
    total, peak, later = np.zeros((2, size), np.int64), held.copy(), np.zeros(size, np.int64)
    for rank, unit in (*plan.unread, *plan.parked):
        held[rank] -= sizes[0][rank][unit]
    for round_ in plan.rounds:
        for units, of_units in ((round_.allocate_before, sizes[1]), (round_.restore_before, sizes[0])):
            for rank, unit in units:
                held[rank] += of_units[rank][unit]
        peak = np.maximum(peak, held)
        held, later = held - later, np.zeros(size, np.int64)
        for rank, unit in round_.release_after:
            later[rank] += sizes[0][rank][unit]
        moved = np.zeros((2, size), np.int64)
        for move in round_.moves:
            if not move.local:
                moved[0, move.source_rank] += move.numel * itemsize
                moved[1, move.target_rank] += move.numel * itemsize
        wire, total = np.maximum(wire, moved), total + moved
    return peak + 2 * wire.sum(0), *total
