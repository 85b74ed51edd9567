"""Measure how the costs of a run grow: with groups, samples and steps.

controller: CPU of the whole controller per group of 8 samples, at 64 to 16,384 groups a step; cards and queue only hold
names, 64 engines of 256 sequences (`tests/stalesync/loop/named_cards.py`). queue: samples per second of puts, gets and
acks while 10k to 1M are held, and bytes a sample. memory: of each process of a run that suspends, drafts, saves and
evaluates, beside its floor, a Ray without any work; and bytes of its folder: means of a tenth of the steps behind step
100, or half of them, and at the end. Times are CPU times, as the reference machine (`tests/machine.py`) would take.
"""

import gc
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

from benchmarks.harness import Arguments, Benchmark, Figures, Option, resident_bytes, rows_of, timed, timed_result

BENCHMARK = Benchmark(
    __doc__,
    [Option("steps", 1000, smoke=6, help="of the run whose memory is measured")],
    "controller.*.us_a_group <= 50, memory.*.growth <= 0.02",
    parts={"controller": "controller", "queue": "queue", "memory": "benchmarks.growth_run:memory"},
    sizes={"groups": ((64, 256, 1024, 4096, 16384), (16, 64)), "min_groups": (8192, 64), "rounds": (3, 1)}
    | {"held": ((10_000, 100_000, 1_000_000), (1_000, 5_000)), "batch": (4096, 512)},
)
BENCHMARK.run_as(__name__)

import torch

from benchmarks.runs import temporary_folder
from distqueue import LocalQueue, PackedBatch
from stalesync.process.garbage import collecting_seldom
from tests.machine import Speed
from tests.stalesync.loop.named_cards import GROUP_SIZE, Stopwatch, make_controller


def on_reference(measure: Callable[[], float], rounds: int) -> float:
    """Return the least of several measured CPU times, in those of the reference machine."""
    return min(measure() / max(1.0, Speed.measure().slowness) for _ in range(rounds))


def controller(args: Arguments) -> Figures:
    cases = {f"staleness {bound}, {groups}": (bound, groups) for bound, groups in product((0, 1), args.groups)}

    def measure(case: str) -> Figures:
        (staleness, groups), calls = cases[case], list[float]()
        work = partial(controller_us, groups, staleness, args.min_groups, calls)
        us = on_reference(work, max(1, args.rounds - (groups >= 16384)))
        return {"us_a_group": us, "queue_calls": calls[-1]}

    return rows_of(cases, measure)


def controller_us(groups: int, staleness: int, min_groups: int, queue_calls: list[float]) -> float:
    """Return CPU microseconds of the controller per group, and append the calls of the queue in a step: the mean of the
    steps that train ``min_groups`` groups, at least two, after a first one."""
    watch = Stopwatch()
    with temporary_folder() as folder:
        controller: Any = make_controller(groups, staleness, folder, uncounted=watch.paused)
        controller.train_step()
        steps = max(2, min_groups // groups)
        with collecting_seldom((staleness + 1) * groups * GROUP_SIZE):
            start_s, calls = watch.read_s(), controller.queue.calls
            for _ in range(steps):
                controller.train_step()
            cpu_s = watch.read_s() - start_s
        queue_calls.append((controller.queue.calls - calls) / steps)
        assert controller.admission.ledger.ended["trained"] == groups * (1 + steps), "all groups were trained"
        controller.folder.close()
    return cpu_s / steps / groups * 1e6


def queue(args: Arguments) -> Figures:
    cases = {f"{held:,} held": held for held in args.held}
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return rows_of(cases, lambda case: pool.apply(measure_queue, (cases[case], args.batch)))


def measure_queue(held: int, size: int, rounds: int = 20) -> Figures:
    """Return samples per second of puts, gets and acks of further samples while ``held`` are in the queue, and the
    bytes of memory per sample."""
    tokens = [torch.arange(8, dtype=torch.int32)] * size

    def batch(start: int, count: int) -> PackedBatch:
        ids = [f"e0-{start + k}/0" for k in range(count)]
        return PackedBatch.from_samples(ids, {"response": tokens[:count]}, ids, [(0, 0)] * count)

    queue = LocalQueue(["reward", "train"])
    queue.put(batch(0, 1))
    gc.collect()
    before = resident_bytes()
    for start in range(1, held, size):
        queue.put(batch(start, min(size, held - start)))
    gc.collect()
    bytes_held = (resident_bytes() - before) / held
    seconds = dict.fromkeys(("put", "get", "ack"), 0.0)
    for number in range(rounds):
        seconds["put"] += timed(partial(queue.put, batch(held + number * size, size)), time.process_time)
        for task in ("reward", "train"):
            get = partial(queue.get, task, ["response"], size, partial=True)
            get_s, taken = timed_result(get, time.process_time)
            seconds["get"] += get_s
            seconds["ack"] += timed(partial(queue.ack, task, taken.ids), time.process_time)
    times = {"put": 1, "get": 2, "ack": 2}
    rates = {f"{name}_samples_per_s": times[name] * rounds * size / total for name, total in seconds.items()}
    return rates | {"bytes_per_sample": bytes_held}
