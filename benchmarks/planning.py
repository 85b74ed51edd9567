"""Measure planning a switch at scale, and verify the plan on every rank.

Pangu 718B (61 layers) on the 768 dies of a CloudMatrix 384, in bfloat16, between TP8 EP8 PP16 and three engines in
TP8 EP256, in both directions, each planned from shapes alone for the first host, by fresh processes over gloo:

    planners                  processes of the host that plan
    cpu_s, parts_cpu_s        CPU seconds of the planner: in `plan_switch`, its layouts included; to make and send the
                              parts of all ranks of its host
    peak_mb, part_mb          resident memory at the peak, of the planner and of a rank that does not plan, beyond that
                              of the process with everything imported
    part_kb, part_cpu_s       bytes that a rank receives, and its CPU seconds to receive and decode them, at most
    over_bound                bytes at the peak over the bound (max(A, B) + 4 buckets), on the worst of all ranks
    busiest                   bytes that the busiest rank sends over those of the busiest in the cost model, which
                              divides every share among all its holders
    missing                   bytes that ranks need and do not receive, or receive twice, by the cost model's count
"""

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from tempfile import TemporaryDirectory

from benchmarks.harness import Arguments, Benchmark, Figures, resident_bytes

BENCHMARK = Benchmark(
    __doc__,
    (),
    "*.planners <= 1, *.cpu_s <= 5, *.peak_mb <= 200, *.part_cpu_s <= 0.5, *.part_mb <= 20, *.over_bound <= 1, "
    "*.busiest <= 1.1, *.missing <= 0",
    sizes={"layers": (61, 4), "ranks": (768, 16), "host": (16, 2)},
)
BENCHMARK.run_as(__name__)

import numpy as np
import torch
import torch.distributed as dist

from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.presets import load_shape
from fusion.costmodel.segments import Side
from fusion.costmodel.shape import Shape
from fusion.costmodel.traffic import switch_traffic
from fusion.ep_switch import Layout, Plan, plan_switch
from fusion.ep_switch.host_plan import Ends, encode, plan_for_host
from fusion.model import Parallel
from fusion.resources import SHAPES

MODEL, HARDWARE = "pangu_718b", "ascend_910c"
BUCKET_BYTES = 512 << 20
"""As in recipes/several_hosts.sh"""


def measure(args: Arguments) -> Figures:
    figures: Figures = {}
    for direction in ("to_infer", "to_train"):
        with (
            TemporaryDirectory() as folder,
            ProcessPoolExecutor(args.host, multiprocessing.get_context("spawn")) as processes,
        ):
            case = args.layers, args.ranks, direction, args.host, folder
            ranks = [processes.submit(measure_rank, rank, *case) for rank in range(args.host)]
            planner, *others = [rank.result() for rank in ranks]
        called = {"planners": planner.pop("planners") + sum(other.pop("planners") for other in others)}
        figures[direction] = called | planner | {name: max(rank[name] for rank in others) for name in others[0]}
    return figures


def measure_rank(
    rank: int, num_layers: int, num_ranks: int, direction: str, host_size: int, folder: str
) -> dict[str, float]:
    """Get a rank's part of the plan of one direction; return its cost and, where it plans, what was verified."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=host_size)
    topology, plans = hardware_named(HARDWARE).topology, list[Plan]()
    dist.barrier()
    before, start = resident_bytes(), time.process_time()
    ends, plan_s = ends_of(num_layers, num_ranks, direction), list[float]()

    def plan() -> list[Plan]:
        plans.append(plan_switch(*ends, BUCKET_BYTES, topology))
        plan_s.append(time.process_time() - start)
        return plans

    parts = plan_for_host(plan, [ends], rank=rank, group=dist.group.WORLD)
    cpu_s, peak_kb = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_mb, planners = (peak_kb * 1024 - before) / 1e6, len(plans)
    if rank:
        part_kb = len(encode(parts, rank)) / 1e3
        return {"planners": planners, "part_kb": part_kb, "part_cpu_s": cpu_s, "part_mb": peak_mb}
    figures = {"planners": planners, "cpu_s": plan_s[0], "parts_cpu_s": cpu_s - plan_s[0], "peak_mb": peak_mb}
    return figures | verified(plans[0])


def ends_of(num_layers: int, num_ranks: int, direction: str) -> Ends:
    config = load_shape(MODEL, SHAPES).shape.config.without_predictors
    config = replace(config, layers=config.layers[:num_layers])
    tp = min(8, num_ranks // 8)
    train = Parallel(num_ranks, tp=tp, ep=tp, pp=min(16, num_ranks // (2 * tp)))
    grids = train, Parallel(num_ranks, tp=tp, ep=min(256, num_ranks))
    one, other = (Layout(config, grid, tuple(range(num_ranks)), torch.bfloat16, BUCKET_BYTES) for grid in grids)
    return (one, other) if direction == "to_infer" else (other, one)


def verified(plan: Plan) -> dict[str, float]:
    """Return what the rounds of a plan hold, send and lack, on the worst of all ranks."""
    from benchmarks.switch import byte_matrix  # behind the measurement: imports take memory

    moved = byte_matrix(plan)
    np.fill_diagonal(moved, 0)
    sides = [Side(layout.parallel) for layout in (plan.source, plan.target)]
    paper = switch_traffic(Shape(MODEL, plan.source.config), *sides, plan.topology)
    return {
        "over_bound": max(plan.peak_bytes(rank) / plan.bound_bytes(rank) for rank in plan.ranks),
        "busiest": moved.sum(1).max() / paper.sent.sum(0).max(),
        "missing": float(np.abs(moved.sum(0) - paper.received.sum(0)).max().round()),
    }
